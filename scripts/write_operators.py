"""Writes docs/reference/operators.md: the torch operators of the package, from what the package defines."""

from __future__ import annotations

import sys
from pathlib import Path

# each brings its operators
import rooftile.approximate
import rooftile.engine.mixers.registry
import rooftile.engine.steps.runner
import rooftile.moe
import rooftile.optim
import rooftile.qat
import rooftile.recommend.hstu.attention
import rooftile.recommend.hstu.paged.attention
import rooftile.recommend.target.attention  # noqa: F401
from rooftile.runtime.operators import DEFINED

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "operators.md"

HEAD = """# Operators

Written by `scripts/write_operators.py`; `make tables` rewrites it.

Every kernel runs inside one of these operators of `torch.ops.rooftile`, so `torch.compile`, a `TorchDispatchMode` and the
profiler see it. A call that is not watched goes straight to the kernel. `rooftile.cost.counts.work(name, arguments, results)`
returns the FLOPs and the bytes of a call.

An argument marked `!` in the schema is written to. An operator with gradients has its backward below it, but for
`linear_quantised` and `linear_two_four`, whose backward is `dequantise_weight`, or `two_four_dense`, and a product; the
others raise `Unsupported` where a gradient is asked for. `normalise`, `add_norm`, `gated` and `rotate` compute their
definition in PyTorch's operations then.

| operator | computes | schema |
|---|---|---|
"""

COMPUTES = {
    "attention": "attention, dense or packed, by one backend",
    "attention_backward": "its gradients",
    "attention_paged": "attention to a paged KV cache",
    "quantise_qkv": "queries, keys and values in FP8 or INT8",
    "attention_quantised": "attention of those",
    "normalise": "a layer norm or an RMS norm",
    "add_norm": "a residual stream with x added, and the norm of the sum",
    "normalise_quantised": "a norm whose rows leave in FP8 or INT8",
    "add_norm_quantised": "a residual stream with x added, and such a norm of the sum",
    "sum_norm_quantised": "the same with a new stream",
    "gated": "a gated activation, with gradients",
    "gated_backward": "its gradient",
    "gate_quantised": "a gated activation whose rows leave in FP8 or INT8",
    "adamw": "a step of AdamW for many weights, in place",
    "linear": "a linear projection, batch-invariant",
    "norm": "a layer norm or an RMS norm, with gradients",
    "norm_backward": "its gradients",
    "sum_norm": "the norm of a sum and the sum, with gradients",
    "sum_norm_backward": "its gradients",
    "gated_norm": "an RMS norm of gated numbers in groups, or a gate after it, with gradients",
    "gated_norm_backward": "its gradients",
    "gate_up": "an activation times another tensor, with gradients",
    "gate_up_backward": "its gradients",
    "rotary": "rotary positions, with gradients",
    "rotary_backward": "its gradient",
    "softmax": "softmax over the last axis, with gradients",
    "softmax_backward": "its gradient",
    "cross_entropy": "cross-entropy of logits, with gradients",
    "cross_entropy_backward": "its gradient",
    "linear_cross_entropy": "cross-entropy of hidden states and the head's weights, with gradients",
    "linear_cross_entropy_backward": "its gradients",
    "linear_cross_entropy_reduced": "its mean or sum, and the gradients for an upstream gradient of one",
    "linear_cross_entropy_reduced_backward": "those times the upstream gradient",
    "quantise_rows": "rows of activations in FP8 or INT8",
    "linear_quantised": "a linear projection with a quantised weight",
    "linear_gated": "such a projection whose halves are a gate and what it gates, gated",
    "linear_gated_rows": "the same in FP8, of rows in FP8, with one scale for all results",
    "linear_rounded": "a linear projection with a weight that is rounded in training",
    "linear_rounded_backward": "its gradients",
    "weight_rounded": "the numbers of a weight that is rounded in training, for modules that read it",
    "weight_rounded_backward": "its gradients",
    "dequantise_weight": "a quantised weight in 16 or 32 bits",
    "two_four_mask": "which two of each four neighbours of a weight are kept",
    "two_four_compress": "what is kept of a weight, and its places",
    "two_four_dense": "a 2:4 weight with zeros in place of what was dropped",
    "linear_two_four": "a linear projection with a 2:4 weight",
    "linear_masked": "a linear projection with a masked weight that is trained",
    "linear_masked_backward": "its gradients",
    "rotate": "rotary positions",
    "write_kv": "keys and values written into a paged cache",
    "write_kv_and_rotate": "the same, with queries rotated",
    "gather_kv": "sequences gathered out of a paged cache",
    "copy_blocks": "blocks of a paged cache copied",
    "choose_pages": "the best blocks of a paged cache for each sequence and key head, rising",
    "page_scores": "the weight of each block of a paged cache, by the leading dims of its keys",
    "native_sparse_decode": "Native Sparse Attention of one query per sequence, from a paged cache",
    "sample": "a token for each row of logits",
    "chunked_recurrence": "linear attention, dense or packed, from a state to a state",
    "chunked_recurrence_backward": "its gradients",
    "experts": "routed and shared experts of each token, with the products before their activation",
    "experts_backward": "its gradients",
    "selected_attention": "attention of packed queries to the blocks of keys that they chose",
    "selected_attention_backward": "its gradients",
    "gated_sum": "the sum of three branches of attention, each times its gate",
    "gated_sum_backward": "its gradients",
    "gathered_attention": "attention within groups of rows that lie anywhere, by lists of their places",
    "gathered_attention_backward": "its gradients",
    "hstu_attention": "attention without softmax over packed users' events, with tables of distances and times",
    "hstu_attention_backward": "its gradients",
    "target_attention": "attention of candidates to their user's events, with softmax or without, whole or the events chosen",
    "target_attention_backward": "its gradients",
    "target_search": "the k events of a user that a candidate reads: by scores, bits of hashes, or category",
    "hstu_attention_paged": "the same for appended events and candidates, whose history is in pages",
}


def page() -> str:
    """Returns the whole page in Markdown."""
    rows = [f"| `{name}` | {words} | `{DEFINED[name]._schema}` |" for name, words in COMPUTES.items()]
    assert set(COMPUTES) == set(DEFINED)
    return HEAD + "\n".join(rows).replace("rooftile::", "") + "\n"


if __name__ == "__main__":
    due = page()
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == due else f"{PAGE.name} is out of date")
    PAGE.write_text(due, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parents[2])}")
