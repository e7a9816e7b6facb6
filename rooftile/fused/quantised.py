"""Norms and gated activations whose result is quantised as it is written, for `rooftile.linear`; they have no gradient.

The codes equal `rooftile.numerics.quantise_rows` of the rounded result. On a GPU that result is never stored.
"""

from __future__ import annotations

from torch import Tensor

from rooftile.fused.gated import check_halves, gate_up_quantised, pair_quantised
from rooftile.fused.norms import added_quantised, normalised_quantised
from rooftile.numerics.quantised_rows import QuantisedRows
from rooftile.runtime.words import answers_foreign_words


@answers_foreign_words
def rms_norm_quantised(
    x: Tensor, weight: Tensor, eps: float = 1e-6, plus_one: bool = False, *, format: str = "fp8"
) -> QuantisedRows:  # fmt: skip
    """Computes `rms_norm` in the given format.

    Args:
        x, weight, eps, plus_one: as in `rms_norm`.
        format: "fp8" or "int8".

    Example:
        >>> rms_norm_quantised(torch.randn(5, 64), torch.ones(64)).codes.dtype
        torch.float8_e4m3fn
    """
    return normalised_quantised(x, weight, None, eps, plus_one, format)


@answers_foreign_words
def layer_norm_quantised(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, format: str = "fp8"
) -> QuantisedRows:  # fmt: skip
    """Computes `layer_norm` in the given format, "fp8" or "int8".

    Example:
        >>> layer_norm_quantised(torch.randn(5, 64), torch.ones(64), torch.zeros(64), format="int8").codes.dtype
        torch.int8
    """
    return normalised_quantised(x, weight, bias, eps, False, format)


@answers_foreign_words
def add_rms_norm_quantised(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, plus_one: bool = False, *, format: str = "fp8"
) -> tuple[QuantisedRows, Tensor]:
    """Computes `add_rms_norm`, its norm in the given format, "fp8" or "int8"; the sum is a tensor as there.

    Example:
        >>> rows, residual = add_rms_norm_quantised(*torch.randn(2, 5, 64), torch.ones(64))
    """
    return added_quantised(x, residual, weight, None, eps, plus_one, format)


@answers_foreign_words
def add_layer_norm_quantised(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, format: str = "fp8"
) -> tuple[QuantisedRows, Tensor]:
    """Computes `add_layer_norm`, its norm in the given format, "fp8" or "int8"; the sum is a tensor as there.

    Example:
        >>> rows, residual = add_layer_norm_quantised(*torch.randn(2, 5, 64), torch.ones(64), torch.zeros(64))
    """
    return added_quantised(x, residual, weight, bias, eps, False, format)


@answers_foreign_words
def gated_quantised(x: Tensor, activation: str, format: str = "fp8", scale: Tensor | None = None) -> QuantisedRows:
    """Computes `gated` in the given format.

    Args:
        x, activation: as in `gated`.
        format: "fp8" or "int8".
        scale: the one scale of all rows in FP8, a tensor of one number; None finds one per row.

    Example:
        >>> gated_quantised(torch.randn(5, 12), "silu").codes.shape
        torch.Size([5, 6])
    """
    check_halves(x, activation)
    gate, up = x.chunk(2, dim=-1)
    return pair_quantised(gate, up, activation, format, scale)


@answers_foreign_words
def swiglu_quantised(gate: Tensor, up: Tensor, *, format: str = "fp8") -> QuantisedRows:
    """Computes `swiglu` in the given format, "fp8" or "int8".

    Example:
        >>> swiglu_quantised(*torch.randn(5, 128).chunk(2, dim=-1)).codes.shape
        torch.Size([5, 64])
    """
    return gate_up_quantised(gate, up, "silu", format)


@answers_foreign_words
def geglu_quantised(gate: Tensor, up: Tensor, tanh: bool = True, *, format: str = "fp8") -> QuantisedRows:
    """Computes `geglu` in the given format, "fp8" or "int8".

    Example:
        >>> geglu_quantised(torch.zeros(3, 8), torch.ones(3, 8)).codes.float().unique()
        tensor([0.])
    """
    return gate_up_quantised(gate, up, "gelu_pytorch_tanh" if tanh else "gelu", format)
