"""Carries: the map that consecutive tokens are on the state before them, so that a rank need not know that state.

The state behind tokens is map(state before) + the state that they reach from zero. Maps of neighbouring ranks are applied one
after the other, in the order of the ranks, so the sums have one order and the same bits on every rank.

    Decay      the product of decays, for each head (ssd) or each number of the state (selective scan)
    Matrix     a product of exp(g) (1 - beta k k^T), (Dk, Dk) for each head: the delta rule
    Shift      the number of tokens: a tail of inputs moves by as many places
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rooftile.recurrent.rule import Given, Run, wide_dtype


class _Plain:
    """A carry whose state knows of all tokens, is zero before them, and whose map needs no state."""

    def nothing(self, state: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_zeros(state)

    def memory(self, state: tuple[int, ...]) -> int | None:
        return None

    def turned(self, map: Tensor, before: Tensor, behind: Tensor) -> Tensor:
        return map


class Decay(_Plain):
    """A factor of the state, which has the first `axes` of the state's axes."""

    def __init__(self, axes: int, exponents: Callable[[Given, Given, Given], Tensor]) -> None:
        self._axes, self._exponents = axes, exponents

    def shape(self, state: tuple[int, ...]) -> tuple[int, ...]:
        return state[: self._axes]

    def map(self, run: Run, tokens: Given, constants: Given, state: Tensor, options: Given) -> Tensor:
        return self._exponents(tokens, constants, options).exp().to(state.dtype)

    def join(self, map: Tensor, before: Tensor, own: Tensor) -> Tensor:
        return self.back(map, before) + own

    def back(self, map: Tensor, grad: Tensor) -> Tensor:
        return map.reshape(*map.shape, *(1,) * (grad.ndim - map.ndim)) * grad


class Matrix(_Plain):
    """A matrix on the axis of keys: the rule itself makes it of the identity, with values of zero."""

    def shape(self, state: tuple[int, ...]) -> tuple[int, ...]:
        return *state[:-1], state[-2]

    def map(self, run: Run, tokens: Given, constants: Given, state: Tensor, options: Given) -> Tensor:
        q, k, v, g, beta = tokens
        D = state.shape[-2]
        one = torch.eye(D, dtype=state.dtype, device=state.device).expand(*state.shape[:2], D, D).contiguous()
        if not q.shape[1]:
            return one
        return run((q, k, v.new_zeros((*v.shape[:-1], D)), g, beta), one)

    def join(self, map: Tensor, before: Tensor, own: Tensor) -> Tensor:
        return map @ before + own

    def back(self, map: Tensor, grad: Tensor) -> Tensor:
        return map.transpose(-1, -2) @ grad


class Shift(_Plain):
    """Places of a tail (rows, W, K - 1): a number on the device, so that no rank waits for it. Nothing is multiplied by zero."""

    def shape(self, state: tuple[int, ...]) -> tuple[int, ...]:
        return state[0], 1

    def memory(self, state: tuple[int, ...]) -> int | None:
        return state[-1]

    def map(self, run: Run, tokens: Given, constants: Given, state: Tensor, options: Given) -> Tensor:
        (x,) = tokens
        return torch.full((state.shape[0], 1), min(x.shape[1], state.shape[-1]), dtype=wide_dtype(state), device=state.device)

    def join(self, map: Tensor, before: Tensor, own: Tensor) -> Tensor:
        return _moved(before, map[:1].long()) + own

    def back(self, map: Tensor, grad: Tensor) -> Tensor:
        return _moved(grad, -map[:1].long())


def _moved(x: Tensor, by: Tensor) -> Tensor:
    """Returns x (..., n) moved to the left by a number of places, zeros behind it."""
    n = x.shape[-1]
    places = torch.arange(n, device=x.device) + by.flatten()
    inside = (places >= 0) & (places < n)
    return x[..., places.clamp(0, max(n - 1, 0))].masked_fill(~inside, 0.0)
