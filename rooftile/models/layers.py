"""The operations between attentions, as functions: where a fused kernel takes the place of one, it takes it here.

They round where Transformers rounds, so that a checkpoint in bfloat16 gives the same text; exceptions are named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooftile.models.config import ModelConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    # Transformers spells out the formula of "gelu_new" and rounds at each of its steps; one kernel rounds once
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


class Memory(NamedTuple):
    """Where a model's tensors are made, and of what kind."""

    dtype: torch.dtype
    device: torch.device

    def parameter(self, *size: int) -> nn.Parameter:
        """A tensor with whatever is in memory, for weights to come; it has no gradient."""
        return nn.Parameter(torch.empty(size, dtype=self.dtype, device=self.device), requires_grad=False)


class Projection(nn.Module):
    """A weight (out, in), and a bias (out,) where the family has one."""

    def __init__(self, outputs: int, inputs: int, *, bias: bool, memory: Memory) -> None:
        super().__init__()
        self.weight = memory.parameter(outputs, inputs)
        self.bias = memory.parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x (total, in) to (total, out)."""
        return functional.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """The weights of a norm, and its kind."""

    def __init__(self, config: ModelConfig, size: int, *, memory: Memory) -> None:
        super().__init__()
        self.kind = config.norm
        self.eps = config.norm_eps
        self.plus_one = config.norm_plus_one
        self.weight = memory.parameter(size)
        self.bias = memory.parameter(size) if self.kind == "layer" else None


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """x over its size in the last axis, times the weight."""
    if _fused(x):
        from rooftile.models import kernels

        return kernels.normalise(x, norm)
    return normalised_as_defined(x, norm)


def add_norm(x: Tensor, residual: Tensor, norm: Norm, post: Norm | None = None) -> tuple[Tensor, Tensor]:
    """The residual stream with x added to it: normalised, and as it is. x is normalised by `post` before, if there is one.

    On a GPU the stream is updated in place: use what is returned, and not `residual`, afterwards.
    """
    if _fused(x):
        from rooftile.models import kernels

        return kernels.add_norm(x, residual, norm, post)
    return added_as_defined(x, residual, norm, post)


def gated(x: Tensor, activation: str) -> Tensor:
    """Activation of the gate times what it lets through: x (total, 2 * ffn), the gate first, to (total, ffn)."""
    if _fused(x):
        from rooftile.models import kernels

        return kernels.gated(x, activation)
    return gated_as_defined(x, activation)


def normalised_as_defined(x: Tensor, norm: Norm) -> Tensor:
    """What `normalise` returns, in plain operations."""
    if norm.kind == "layer":
        return functional.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.plus_one:
        # Gemma's weights are distances from one, and multiply before rounding
        return (wide * (1.0 + norm.weight.float())).to(x.dtype)
    return norm.weight * wide.to(x.dtype)


def added_as_defined(x: Tensor, residual: Tensor, norm: Norm, post: Norm | None = None) -> tuple[Tensor, Tensor]:
    """What `add_norm` returns, in plain operations; the residual stays."""
    residual = residual + (x if post is None else normalised_as_defined(x, post))
    return normalised_as_defined(residual, norm), residual


def gated_as_defined(x: Tensor, activation: str) -> Tensor:
    """What `gated` returns, in plain operations."""
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def _fused(x: Tensor) -> bool:
    """The kernels compute in fp32."""
    return x.is_cuda and x.dtype != torch.float64


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Scores pressed smoothly into (-cap, cap)."""
    return x if cap is None else cap * torch.tanh(x / cap)
