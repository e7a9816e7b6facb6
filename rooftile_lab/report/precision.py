"""The experiment on precision: the error of FP8 and INT8 attention on tensors that are easy and hard to quantise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rooftile.exact.masks import FULL
from rooftile.exact.spec import DTYPES
from rooftile_lab.bench.accuracy import DISTRIBUTIONS, Loss, draws, losses
from rooftile_lab.report.plan import Plan

HEADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionErrors:
    """The error of each recipe, by distribution."""

    length: int
    heads: int
    dim: int
    draws: int
    dtype: str
    losses: dict[str, list[Loss]]

    def of(self, distribution: str, recipe: str) -> Loss:
        (found,) = [loss for loss in self.losses[distribution] if loss.recipe == recipe]
        return found


def measure(plan: Plan, device: str, step: Callable[[float, str], None]) -> PrecisionErrors:
    """Measures the recipes of `rooftile accuracy` on each of its distributions."""
    shape = (1, plan.bits_length, HEADS, plan.bits_dim)
    found = {}
    for number, name in enumerate(DISTRIBUTIONS):
        step(number / len(DISTRIBUTIONS), f"FP8 and INT8 attention: {name}")
        inputs = draws(name, shape, plan.bits_draws, DTYPES["bf16"], torch.device(device))
        found[name] = losses(inputs, FULL, lambda words: None)
    return PrecisionErrors(
        length=plan.bits_length, heads=HEADS, dim=plan.bits_dim, draws=plan.bits_draws, dtype="bf16", losses=found
    )
