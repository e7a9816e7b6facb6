"""The decoder's memory-bound kernels: bytes a second beside a copy, and beside the plain operations that define them.

    PYTHONPATH=. python benchmarks/decoder_kernels.py COMMIT >> benchmarks/results/h200-decoder-kernels.jsonl

bf16; contestants take turns, medians of all samples, the L2 cache flushed before each. Bytes are those that must move: what is
read once and what is written once.
"""

# ruff: noqa: T201 - what it prints is what it is for
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from rooftile.bench.clock import clock_for, medians
from rooftile.bench.session import open_session
from rooftile.fused import add_norm, gated, normalise
from rooftile.fused.gated import gated_as_defined
from rooftile.fused.norm import added_as_defined, normalised_as_defined
from rooftile.models.config import ModelConfig
from rooftile.models.layers import Memory, Norm

ROWS, HIDDEN, FFN = (1, 256, 8192), (2048, 4096), (8192, 14336)
# heads of queries, heads of keys, and their size
HEADS = (32, 8, 128)
MEMORY = Memory(torch.bfloat16, torch.device("cuda"))
LLAMA = ModelConfig(
    family="llama", vocab_size=1, layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, max_len=1, scale=1.0,
    windows=(None,), rotary=None,
)  # fmt: skip
GEMMA = replace(LLAMA, norm_plus_one=True)
GPT2 = replace(LLAMA, norm="layer")


def norm_of(config: ModelConfig, size: int) -> Norm:
    norm = Norm(config, size, memory=MEMORY)
    for weight in norm.parameters():
        weight.normal_()
    return norm


def contests() -> list[tuple[dict[str, Any], int, Callable[[], Any], Callable[[], Any]]]:
    """What it is, the numbers that move, ours, and the definition."""
    found: list[tuple[dict[str, Any], int, Callable[[], Any], Callable[[], Any]]] = []
    for rows in ROWS:
        for size in HIDDEN:
            x, residual = torch.randn(2, rows, size, device="cuda", dtype=torch.bfloat16)
            row = {"rows": rows, "size": size}
            norm, layer, gemma, post = (norm_of(config, size) for config in (LLAMA, GPT2, GEMMA, GEMMA))
            numbers = rows * size
            found += [
                (
                    row | {"what": "norm"}, 2 * numbers + size,
                    partial(normalise, x, norm), partial(normalised_as_defined, x, norm),
                ),
                (
                    row | {"what": "add, norm"}, 4 * numbers + size,
                    partial(add_norm, x, residual.clone(), norm), partial(added_as_defined, x, residual, norm),
                ),
                (
                    row | {"what": "add, layer norm"}, 4 * numbers + 2 * size,
                    partial(add_norm, x, residual.clone(), layer), partial(added_as_defined, x, residual, layer),
                ),
                (
                    row | {"what": "norm, add, norm"}, 4 * numbers + 2 * size,
                    partial(add_norm, x, residual.clone(), gemma, post), partial(added_as_defined, x, residual, gemma, post),
                ),
            ]  # fmt: skip
        heads, kv_heads, dim = HEADS
        qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
        q, norm = qkv.unflatten(-1, (-1, dim))[:, :heads], norm_of(LLAMA, dim)
        row = {"what": "norm of heads", "rows": rows, "size": heads * dim}
        found.append((row, 2 * q.numel() + dim, partial(normalise, q, norm), partial(normalised_as_defined, q, norm)))
        for ffn in FFN:
            x = torch.randn(rows, 2 * ffn, device="cuda", dtype=torch.bfloat16)
            for name in ("silu", "gelu_pytorch_tanh"):
                row = {"what": f"gate, {name}", "rows": rows, "size": ffn}
                found.append((row, 3 * rows * ffn, partial(gated, x, name), partial(gated_as_defined, x, name)))
    return found


def main(commit: str) -> None:
    clock, session = clock_for(torch.device("cuda"), 12.0), open_session(torch.device("cuda"))
    copy_gbs = session.ceilings.copy_gbs
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit, "copy_gbs": copy_gbs}
    about |= {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    with torch.inference_mode():
        for row, numbers, ours, defined in contests():
            taken = medians({"ours": ours, "defined": defined}, clock)
            gbs = 2 * numbers / taken["ours"] / 1e3
            row |= {"us": round(taken["ours"], 2), "gbs": round(gbs, 1), "of_copy": round(gbs / copy_gbs, 3)}
            row |= {"defined_us": round(taken["defined"], 2), "times": round(taken["defined"] / taken["ours"], 2)}
            print(json.dumps(row | about), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "unknown")
