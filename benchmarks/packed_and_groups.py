"""Packed sequences beside dense ones, and groups beside as many heads without: TFLOP/s, forward and backward.

    PYTHONPATH=. python benchmarks/packed_and_groups.py COMMIT [fwd|bwd] >> benchmarks/results/h200-packed.jsonl

16,384 tokens and 2,048 / D heads, bf16. The packed lengths are drawn between 64 and 8,192 from a fixed seed; dense is two
sequences of 8,192. What is compared takes turns, and each number is the median of all its samples.
"""

# ruff: noqa: T201 - what it prints is what it is for
from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

import rooftile as rt
from rooftile.bench.clock import clock_for, medians
from rooftile.masks import CAUSAL, FULL, Mask

TOKENS, DENSE = 16384, 8192


def packed_lengths(seed: int) -> list[int]:
    draw = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(min(draw.randint(64, 8192), TOKENS - sum(lengths)))
    return lengths


def flops(lengths: list[int], heads: int, dim: int, mask: Mask, phase: str) -> float:
    pairs = sum(n * n for n in lengths) / (2 if mask == CAUSAL else 1)
    return (4 if phase == "fwd" else 10) * heads * pairs * dim


def works(forward: Callable[..., Tensor], shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], Any]]:
    """Forward and backward of one call on random tensors."""
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = forward(*leaves)
    do = torch.randn_like(o)
    return {"fwd": lambda: forward(q, k, v), "bwd": lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)}


def main(commit: str, phases: tuple[str, ...]) -> None:
    clock = clock_for(torch.device("cuda"))
    device = torch.cuda.get_device_name()
    about = {"device": device, "torch": torch.__version__, "commit": commit, "date": datetime.now(UTC).isoformat()}
    for dim in (64, 128, 256):
        heads = 2048 // dim
        for mask in (FULL, CAUSAL):

            def dense(q: Tensor, k: Tensor, v: Tensor, mask: Mask = mask) -> Tensor:
                return rt.attention(q, k, v, mask)

            sequences = TOKENS // DENSE
            runs = {"dense": ([DENSE] * sequences, works(dense, [(sequences, DENSE, heads, dim)] * 3))}
            for group in (4, 8):
                keys = (sequences, DENSE, heads // group, dim)
                runs[f"group {group}"] = (
                    [DENSE] * sequences,
                    works(dense, [(sequences, DENSE, heads, dim), keys, keys]),
                )
            for seed in (0, 1):
                lengths = packed_lengths(seed)
                cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")

                def packed(q: Tensor, k: Tensor, v: Tensor, mask: Mask = mask, cu: Tensor = cu) -> Tensor:
                    return rt.attention_packed(q, k, v, cu, cu, mask)

                runs[f"packed {seed}"] = (lengths, works(packed, [(TOKENS, heads, dim)] * 3))
            for phase in phases:
                us = medians({name: both[phase] for name, (_, both) in runs.items()}, clock)
                speed = {
                    name: flops(lengths, heads, dim, mask, phase) / us[name] / 1e6
                    for name, (lengths, _) in runs.items()
                }
                for name, (lengths, _) in runs.items():
                    row = {"what": name, "phase": phase, "dim": dim, "mask": str(mask), "lengths": lengths}
                    found = {"tflops": round(speed[name], 1), "of_dense": round(speed[name] / speed["dense"], 3)}
                    print(json.dumps(row | found | about), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "unknown", tuple(sys.argv[2:]) or ("fwd", "bwd"))
