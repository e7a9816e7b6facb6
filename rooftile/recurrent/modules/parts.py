"""The parts that layers with a recurrence share: their state, the gated norm, the convolution, and first values."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rooftile.fused.gated_norm import rms_norm_gated
from rooftile.recurrent.words import LAYER_CALL
from rooftile.runtime.arguments import check_count, check_flag, check_number
from rooftile.runtime.words import answers_with


class RecurrentState(NamedTuple):
    """The state of a layer after some tokens.

    tail (B, width of the convolution, K - 1): its last inputs; state: the state of the recurrence, float32.
    """

    tail: Tensor
    state: Tensor


class RecurrentLayer(nn.Module):
    """A layer whose memory of earlier tokens is a `RecurrentState`; a kind of layer writes `_mixed`."""

    @answers_with(LAYER_CALL)
    def forward(self, x: Tensor, *, cu: Tensor | None = None) -> Tensor:
        """Mixes the tokens of x (B, T, dim), or of packed sequences (total, dim) with offsets cu (B + 1,), int32."""
        return self._mixed(x, None, None, cu, False)[0]

    @answers_with(LAYER_CALL)
    def with_state(
        self, x: Tensor, state: RecurrentState | None = None, *, cu: Tensor | None = None
    ) -> tuple[Tensor, RecurrentState]:  # fmt: skip
        """Mixes the tokens of x (B, T, dim), or of packed sequences (total, dim) with offsets cu.

        Args:
            x: the inputs.
            state: the state after earlier tokens; None at the beginning. Gradients flow to it.
            cu: offsets (B + 1,), int32.

        Returns:
            y, as x, and the state after these tokens.
        """
        tail, first = (None, None) if state is None else state
        y, tail, last = self._mixed(x, tail, first, cu, True)
        assert tail is not None
        assert last is not None
        return y, RecurrentState(tail, last)

    @abstractmethod
    def _mixed(
        self, x: Tensor, tail: Tensor | None, first: Tensor | None, cu: Tensor | None, keeps: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Returns y, the last tail of the convolution and the last state of the recurrence; with `keeps` alone these.

        Where ranks share a sequence, states that are returned have to reach every rank.
        """


def parted(found: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Returns the outputs of a recurrence and its last state, None where it was not asked for."""
    return found if isinstance(found, tuple) else (found, None)


class GatedNorm(nn.Module):
    """RMS norm of numbers that are multiplied by a gate: each of `groups` parts of the last axis by itself.

    Args:
        dim: the last axis.
        groups: its parts.
        gate_first: whether the norm is of x silu(z) (Mamba-2); else norm(x) is multiplied by silu(z) (gated delta net).
        eps: is added to the mean of squares.
    """

    def __init__(
        self, dim: int, groups: int = 1, *, gate_first: bool = True, eps: float = 1e-5,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.groups, self.gate_first, self.eps = groups, gate_first, check_number("eps", eps)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Normalises x (..., dim), with the gate z, in fp32; returns the dtype of x."""
        return rms_norm_gated(x, z, self.weight, groups=self.groups, gate_first=self.gate_first, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, groups={self.groups}, gate_first={self.gate_first}, eps={self.eps}"


def convolution(
    width: int, taps: int, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Conv1d:  # fmt: skip
    """Returns a module with the weights of a depthwise causal convolution, under the names that checkpoints have for them."""
    has_bias = check_flag("conv_bias", bias)
    return nn.Conv1d(width, width, taps, groups=width, padding=taps - 1, bias=has_bias, device=device, dtype=dtype)


def first_dt_bias(count: int, low: float = 1e-3, high: float = 0.1, least: float = 1e-4) -> Tensor:
    """Returns biases whose softplus is uniform in its logarithm between low and high, and at least `least`."""
    dt = torch.exp(torch.rand(count) * (math.log(high) - math.log(low)) + math.log(low)).clamp(min=least)
    # the inverse of softplus
    return dt + torch.log(-torch.expm1(-dt))


def undecayed(value: Tensor, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Parameter:
    """Returns a parameter that no weight decay should touch: `_no_weight_decay` says so, as mamba-ssm's does.

    It is in fp32, or in fp64 in a layer of that dtype.
    """
    wide = torch.promote_types(torch.get_default_dtype() if dtype is None else dtype, torch.float32)
    parameter = nn.Parameter(value.to(device, wide))
    parameter._no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


def check_sizes(**sizes: int) -> Iterator[int]:
    """Returns sizes as Python's whole numbers, in order; each must be at least 1."""
    return (check_count(name, size) for name, size in sizes.items())
