"""Calls of operators as a step records them, and an operator that computes much on few bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rooftile.diagnosis.records import OperatorRow, Sample


def sample(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Sample:
    """Returns a recorded call. Its counts are made up."""
    operation = OperatorRow(
        module="", op=str(function), phase="forward", calls=1, flops=1000, special=0, bytes=1000, where="", dtype="fp32",
        device="cpu", key=(), indices=(0,),
    )  # fmt: skip
    return Sample(operation, function, args, kwargs)


def ten_passes(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Returns a step of ten multiplications and additions, which one fused loop can do."""

    def step() -> torch.Tensor:
        y = x
        for _ in range(10):
            y = y * 1.01 + 0.5
        return y

    return step


def fma_200(x: torch.Tensor) -> torch.Tensor:
    """Returns the result of 200 multiply-adds on each number, of pieces that stay in the cache, as in a fused kernel."""
    made = torch.empty_like(x)
    for start in range(0, x.numel(), 8192):
        part = x[start : start + 8192].clone()
        for _ in range(200):
            part.mul_(0.9).add_(0.1)
        made[start : start + 8192] = part
    return made
