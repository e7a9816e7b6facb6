"""Rooftile: attention, number formats and training for them, LLM serving, and a diagnosis of bottlenecks, for PyTorch.

    import rooftile as rt
    o = rt.attention(q, k, v, rt.CAUSAL)            # exact: q (B, T, H, D), k and v (B, S, Hk, D)
    print(rt.explain(q, k, v, rt.CAUSAL))           # which backend runs, and why the others do not
    print(rt.diagnose(model, x, backward=True))     # what bounds a program, and what would help

    rt.fuse(model)                                  # a Transformers model on one-pass kernels
    rt.qat.prepare(model, "int4")                   # trains with the rounding of the server
    print(rt.plan(model, x))                        # a number format for each layer
    rt.linear(x, rt.quantise_weight(w, "fp8"))      # a product with a quantised weight

    rt.LLM(folder).generate(prompts)                # serves from a paged KV cache
    rt.kvcache, rt.attention_paged                  # the cache, and attention to it
    rt.approximate                                  # attention to fewer pairs
    rt.moe                                          # experts: routers, products, the balance loss
    rt.hstu_attention, rt.target_attention          # attention over users' events, for recommenders

Names are imported when they are first used: `import rooftile` brings neither torch nor Triton.
"""

import sys
from typing import TYPE_CHECKING

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Prefix, Targets, Window
from rooftile.integrations import disable, enable, enabled, is_enabled, status
from rooftile.integrations.after_import import call_after_import
from rooftile.integrations.transformers_import import register_when_imported
from rooftile.runtime import foreign_words
from rooftile.runtime.late_names import late_names

if TYPE_CHECKING:
    from rooftile import nn, optim, qat
    from rooftile.diagnosis.examination import doctor
    from rooftile.diagnosis.programs.diagnose_call import diagnose
    from rooftile.engine import LLM, SamplingParams
    from rooftile.exact.api import (
        attention,
        attention_packed,
        attention_packed_with_lse,
        attention_paged,
        attention_paged_with_lse,
        attention_quantised,
        attention_quantised_with_lse,
        attention_with_lse,
        explain,
        merge,
        quantise_qkv,
    )
    from rooftile.exact.blocks import Blocks
    from rooftile.integrations.fusion import fuse, unfuse
    from rooftile.numerics.precision import Precision
    from rooftile.planning.make_plan import plan
    from rooftile.qat import quantise_model
    from rooftile.recommend.hstu.attention import hstu_attention
    from rooftile.recommend.target.attention import target_attention, target_attention_with_events
    from rooftile.weights import QuantisedWeight, quantise_weight
    from rooftile.weights import two_four as sparsity
    from rooftile.weights.linear import linear

__version__ = "0.1.0"

__all__ = [
    "CAUSAL",
    "FULL",
    "LLM",
    "Blocks",
    "Chunk",
    "InvalidInput",
    "Mask",
    "Precision",
    "Prefix",
    "QuantisedWeight",
    "SamplingParams",
    "Targets",
    "Unsupported",
    "Window",
    "attention",
    "attention_packed",
    "attention_packed_with_lse",
    "attention_paged",
    "attention_paged_with_lse",
    "attention_quantised",
    "attention_quantised_with_lse",
    "attention_with_lse",
    "diagnose",
    "disable",
    "doctor",
    "enable",
    "enabled",
    "explain",
    "fuse",
    "hstu_attention",
    "is_enabled",
    "linear",
    "merge",
    "nn",
    "optim",
    "plan",
    "qat",
    "quantise_model",
    "quantise_qkv",
    "quantise_weight",
    "sparsity",
    "status",
    "target_attention",
    "target_attention_with_events",
    "unfuse",
]

# the modules of public names that need torch: they are imported with torch, or when a name is first asked for
_HOMES = {
    **dict.fromkeys(
        (
            "attention", "attention_packed", "attention_packed_with_lse", "attention_paged", "attention_paged_with_lse",
            "attention_quantised", "attention_quantised_with_lse", "attention_with_lse", "explain", "merge", "quantise_qkv",
        ),
        "rooftile.exact.api",
    ),
    "Blocks": "rooftile.exact.blocks", "Precision": "rooftile.numerics.precision", "linear": "rooftile.weights.linear",
    "QuantisedWeight": "rooftile.weights", "quantise_weight": "rooftile.weights",
    "quantise_model": "rooftile.qat", "sparsity": "rooftile.weights:two_four",
    "hstu_attention": "rooftile.recommend.hstu.attention",
    **dict.fromkeys(("target_attention", "target_attention_with_events"), "rooftile.recommend.target.attention"),
    "fuse": "rooftile.integrations.fusion", "unfuse": "rooftile.integrations.fusion",
}  # fmt: skip
# likewise, but never before they are asked for, since their imports are slow
_SLOW = {
    "LLM": "rooftile.engine", "SamplingParams": "rooftile.engine", "diagnose": "rooftile.diagnosis.programs.diagnose_call",
    "plan": "rooftile.planning.make_plan", "doctor": "rooftile.diagnosis.examination",
}  # fmt: skip
_find = late_names("rooftile", _HOMES | _SLOW)


def _load() -> None:
    """Imports what needs torch, so that a program that has torch has Rooftile's operators, too."""
    modules = [module for name, module in sys.modules.copy().items() if name.startswith("rooftile.")]
    # in the middle of one of our own imports the others would find half of a module; names then come when they are used
    if not any(getattr(module.__spec__, "_initializing", False) for module in modules):
        for name in ("nn", "optim", "qat", *_HOMES):
            _find(name)


def __getattr__(name: str) -> object:
    """Imports a name when it is first used; answers names of other libraries."""
    if name in foreign_words.NAMES:
        raise AttributeError(f"module 'rooftile' has no attribute {name!r}: {foreign_words.NAMES[name]}")
    return _find(foreign_words.AMERICAN.get(name, name))


def __dir__() -> list[str]:
    """Returns the public names. The package's modules are found by importing them."""
    return sorted([*__all__, "__version__"])


# attn_implementation="rooftile" needs no other call
register_when_imported()
if "torch" in sys.modules:
    _load()
else:
    call_after_import("torch", _load)
