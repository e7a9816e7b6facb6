"""What `deterministic=True` costs in the backward: TFLOP/s with and without, by turns.

    PYTHONPATH=. python benchmarks/deterministic.py COMMIT >> benchmarks/results/h200-deterministic.jsonl

16,384 tokens and 2,048 / D heads, bf16. At a head dim of 256 both are the same kernels.
"""

# ruff: noqa: T201 - what it prints is what it is for
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime

import torch
from torch import Tensor

import rooftile as rt
from rooftile.bench.clock import clock_for, medians
from rooftile.masks import CAUSAL, FULL, Mask

TOKENS = 16384


def backward(S: int, dim: int, mask: Mask, deterministic: bool) -> Callable[[], tuple[Tensor, ...]]:
    shape = (TOKENS // S, S, 2048 // dim, dim)
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    o = rt.attention(*leaves, mask, deterministic=deterministic)
    do = torch.randn_like(o)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def main(commit: str) -> None:
    clock = clock_for(torch.device("cuda"))
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit}
    about["date"] = datetime.now(UTC).isoformat()
    for dim in (64, 128):
        for mask in (FULL, CAUSAL):
            for S in (512, 2048, 8192):
                us = medians({choice: backward(S, dim, mask, choice) for choice in (False, True)}, clock)
                flops = 10 * TOKENS * S * 2048 / (2 if mask == CAUSAL else 1)
                row = {"dim": dim, "mask": str(mask), "S": S, "tflops": round(flops / us[False] / 1e6, 1)}
                row |= {"deterministic_tflops": round(flops / us[True] / 1e6, 1), "price": round(us[True] / us[False] - 1, 3)}
                print(json.dumps(row | about), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "unknown")
