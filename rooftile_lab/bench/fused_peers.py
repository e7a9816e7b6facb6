"""Fused operations of other libraries, beside which `rooftile bench fused` and `rooftile bench loss` time ours.

A peer that cannot be imported, raises, or gives other results or gradients than the formula is not timed, and its row says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rooftile_lab.bench.works import keep_graphs, words_of_error

Call = Callable[..., Any]
# the error of a peer's results and gradients, as a share of what is due (Frobenius)
MOST_ERROR = 0.02


def named(module: str, name: str) -> Call:
    """A function of another package, imported when it is first called."""

    def call(*arguments: Any, **words: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **words)

    return call


def compiled(call: Call) -> Call:
    """A formula compiled for static shapes, tuned; a graph of its own launches would hide the host's time of this one alone."""
    keep_graphs()
    return torch.compile(call, dynamic=False, mode="max-autotune-no-cudagraphs")


def many(found: Any) -> list[Tensor]:
    """The results of a call as a list."""
    return [found] if isinstance(found, Tensor) else [x for x in found if isinstance(x, Tensor)]


def refusal(call: Call, formula: Call, leaves: Sequence[Tensor], rest: Sequence[Any] = (), gradients: bool = True) -> str:
    """Why a call is not timed; an empty text if its results and gradients agree with the formula in fp32."""
    exact = [x.detach().float().requires_grad_(gradients) for x in leaves]
    ours = [x.detach().clone().requires_grad_(gradients) for x in leaves]
    due = many(formula(*exact, *rest))
    generator = torch.Generator(leaves[0].device).manual_seed(0)
    dys = [torch.randn(y.shape, generator=generator, device=y.device) if y.ndim else torch.ones_like(y) for y in due]
    # a peer is not ours: whatever stops it is its reason
    try:
        found = many(call(*ours, *rest))[: len(due)]
        if gradients:
            found += torch.autograd.grad(found, ours, [dy.to(y.dtype) for dy, y in zip(dys, found, strict=True)])
    except Exception as error:
        return words_of_error(error)
    if gradients:
        due += torch.autograd.grad(due, exact, dys)
    if len(found) != len(due) or any(x.shape != y.shape for x, y in zip(found, due, strict=True)):
        return f"it gives {[tuple(x.shape) for x in found]}; due {[tuple(x.shape) for x in due]}"
    pairs = [(x.detach().float(), y.detach()) for x, y in zip(found, due, strict=True)]
    errors = [float((x - y).norm() / y.norm().clamp(min=1e-30)) for x, y in pairs]
    if not max(errors) <= MOST_ERROR:
        return f"its error is {max(errors):.1%} of what is due; may be {MOST_ERROR:.0%}"
    return ""
