"""Gated activations of a feed-forward network: SwiGLU, GeGLU and their kin.

Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.fused.where import runs_on
from rooftile.operators import call, define, needs_steps

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    # Transformers spells out the formula of "gelu_new" and rounds at each of its steps; one kernel rounds once
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


def gated(x: Tensor, activation: str) -> Tensor:
    """Activation of the first half of each row times its second half: x (total, 2 * ffn) to (total, ffn), rounded twice.

    activation: a name in `ACTIVATIONS`.

    Example:
        >>> gated(torch.randn(5, 12), "silu").shape
        torch.Size([5, 6])
    """
    if needs_steps(x):
        return gated_as_defined(x, activation)
    found: Tensor = call(_GATED, _gated, x, activation)
    return found


def gated_as_defined(x: Tensor, activation: str) -> Tensor:
    """`gated` in plain operations."""
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def _gated(x: Tensor, activation: str) -> Tensor:
    # the kernel computes in fp32
    if runs_on(x) and x.dtype != torch.float64:
        from rooftile.fused.kernels import gated as kernels

        return kernels.gated(x, activation)
    return gated_as_defined(x, activation).contiguous()


def _fake(x: Tensor, activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


_GATED = define("gated(Tensor x, str activation) -> Tensor", _gated, _fake)
