"""The parts of a layer that hold weights; `rooftile.fused` computes with them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooftile.models.config import ModelConfig


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


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Scores pressed smoothly into (-cap, cap)."""
    return x if cap is None else cap * torch.tanh(x / cap)
