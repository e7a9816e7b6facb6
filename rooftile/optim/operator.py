"""The operator `rooftile::adamw`: a step of many weights of one dtype, by one kernel, or by the definition weight by weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.optim.definition import StepNumbers, update
from rooftile.optim.split import is_channels_last
from rooftile.runtime.devices import runs_kernels
from rooftile.runtime.operators import call, define


def step(
    weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor], rests: list[Tensor],
    sums: list[Tensor], steps: list[Tensor], masks: list[Tensor], lr: Tensor | None, clip: Tensor | None,
    numbers: StepNumbers, maximize: bool,
) -> None:  # fmt: skip
    """Takes one step of all weights, in place. They are on one device, and each list has one dtype.

    `rests` and `sums` are empty without a split master, `steps` where the numbers say the step, and `masks` where nothing is left
    out.
    """
    call(_ADAMW, _run, weights, gradients, first, second, rests, sums, steps, masks, lr, clip, list(numbers), maximize)


def _run(
    weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor], rests: list[Tensor],
    sums: list[Tensor], steps: list[Tensor], masks: list[Tensor], lr: Tensor | None, clip: Tensor | None,
    numbers: list[float], maximize: bool,
) -> None:  # fmt: skip
    if not weights:
        return
    named = StepNumbers(*numbers)
    if runs_kernels(weights[0]) and weights[0].dtype != torch.float64 and all(map(is_dense, weights)):
        from rooftile.optim import adamw_kernels

        adamw_kernels.step(weights, gradients, first, second, rests, sums, steps, masks, lr, clip, named, maximize)
        return
    for n, weight in enumerate(weights):
        rest, sum, count, mask = (each[n] if each else None for each in (rests, sums, steps, masks))
        update(weight, gradients[n], first[n], second[n], rest, sum, count, lr, clip, named, maximize, mask)


def is_dense(weight: Tensor) -> bool:
    """Whether a weight fills its memory, so that a kernel may read it as a row."""
    return weight.is_contiguous() or is_channels_last(weight)


def _fake(*arguments: Any) -> None:
    return None


_ADAMW = define(
    "adamw(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] first, Tensor(c!)[] second, Tensor(d!)[] rests, "
    "Tensor(e!)[] sums, Tensor[] steps, Tensor[] masks, Tensor? lr, Tensor? clip, float[] numbers, bool maximize) -> ()",
    _run,
    _fake,
)
