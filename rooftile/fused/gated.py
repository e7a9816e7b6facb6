"""Gated activations of a feed-forward network: SwiGLU, GeGLU and their kin, of one tensor, and of two with gradients.

Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.fused import kernels
from rooftile.fused.differentiable import Operation
from rooftile.fused.where import check_floats, checked, kernels_run_on, quantised, quantised_words
from rooftile.numerics.activations import ACTIVATIONS, gated_halves
from rooftile.numerics.quantised_rows import QuantisedRows, as_rows, fake_rows, quantise_rows
from rooftile.runtime.operators import call, define, needs_steps
from rooftile.runtime.words import answers_with

# the longest row that a program gates and quantises at once
LONGEST = 1 << 15
_TANH, _CUBIC = math.sqrt(2 / math.pi), 0.044715


@answers_with(quantised_words("gated"))
def gated(x: Tensor, activation: str) -> Tensor:
    """Activation of the first half of each row times its second half: x (..., 2 * ffn) to (..., ffn), rounded twice.

    Args:
        x: float, any strides.
        activation: gelu, gelu_new, gelu_pytorch_tanh, relu or silu.

    Example:
        >>> gated(torch.randn(5, 12), "silu").shape
        torch.Size([5, 6])
    """
    check_halves(x, activation)
    (y,) = _GATED(as_rows(x), activation)
    return y.view(*x.shape[:-1], x.shape[-1] // 2)


def check_halves(x: Tensor, activation: str) -> None:
    """Checks the arguments of `gated`.

    Raises:
        InvalidInput: x has no two halves, or there is no such activation.
    """
    check_floats(x=x)
    if x.shape[-1] % 2:
        raise InvalidInput(f"x is {tuple(x.shape)}; its last axis must be even: a gate, and as much that it gates")
    if activation not in ACTIVATIONS:
        raise InvalidInput(f"activation is {activation!r}; must be one of {', '.join(ACTIVATIONS)}")


def _gated(x: Tensor, activation: str) -> tuple[Tensor]:
    # the kernel computes in fp32
    if kernels_run_on(x):
        return (kernels.gated.gated(x, activation),)
    return (gated_halves(x, activation).contiguous(),)


def _gated_gradients(dy: Tensor, y: None, x: Tensor, activation: str) -> tuple[Tensor]:
    gate, up = x.chunk(2, dim=-1)
    return (torch.cat(_gradients(dy, None, gate, up, activation), -1),)


def _run_gated_gradients(dy: Tensor, y: None, x: Tensor, activation: str) -> tuple[Tensor]:
    if kernels_run_on(x):
        return (kernels.gate_up.gradients_of_halves(dy, x, activation),)
    return _gated_gradients(dy, None, x, activation)


_GATED = Operation(
    "gated", "Tensor x, str activation", results=1, run=_gated, defined=lambda x, activation: (gated_halves(x, activation),),
    run_gradients=_run_gated_gradients, gradients=_gated_gradients,
    fake=lambda x, _: (x.new_empty((x.shape[0], x.shape[1] // 2)),), fake_gradients=lambda dy, y, x, _: (x.new_empty(x.shape),),
    given_to={0: 0}, unused=frozenset((0,)),
)  # fmt: skip


@answers_with(quantised_words("swiglu"))
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: each rounded to the tensors' dtype, as in a model that computes one after the other.

    Args:
        gate, up: (..., F), alike; rows may be strided, as halves of one projection are.

    Example:
        >>> swiglu(*torch.randn(5, 128).chunk(2, dim=-1)).shape
        torch.Size([5, 64])
    """
    return gate_up(gate, up, "silu")


@answers_with(quantised_words("geglu"))
def geglu(gate: Tensor, up: Tensor, tanh: bool = True) -> Tensor:
    """gelu(gate) * up, with GELU's approximation by tanh, or exact.

    Example:
        >>> geglu(torch.zeros(3, 8), torch.ones(3, 8)).unique()
        tensor([0.])
    """
    return gate_up(gate, up, "gelu_pytorch_tanh" if tanh else "gelu")


def gate_up_quantised(gate: Tensor, up: Tensor, activation: str, format: str) -> QuantisedRows:
    """Computes `gate_up` in a format, "fp8" or "int8"."""
    _check(gate, up)
    if needs_steps(gate, up):
        return quantised(gate_up(gate, up, activation), format)
    return pair_quantised(gate, up, activation, format, None)


def pair_quantised(gate: Tensor, up: Tensor, activation: str, format: str, scale: Tensor | None) -> QuantisedRows:
    """Computes the gated product of checked tensors in a format, with one scale for all rows if it is given.

    Raises:
        InvalidInput: there is no such format, or a gradient or a transform is wanted.
    """
    checked(format)
    if needs_steps(gate, up):
        raise InvalidInput(
            f"format is {format!r} and a gradient or a transform is wanted, which rounding has none of; call gated, and quantise "
            "the result"
        )
    rows = (as_rows(x) for x in (gate, up))
    codes, scales = call(_GATE_QUANTISED, _run_quantised, *rows, activation, format, scale)
    return QuantisedRows(codes.view(gate.shape), scales.view(*gate.shape[:-1], 1), format, gate.dtype)


def _run_quantised(gate: Tensor, up: Tensor, activation: str, out: str, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    # a row is in registers at once
    if kernels_run_on(gate) and gate.shape[-1] <= LONGEST:
        return kernels.gate_quantised.quantised(gate, up, activation, out, scale)
    rows = quantise_rows(_run_pair(gate, up, activation)[0], out, scale=scale)
    return rows.codes, rows.scales


def _check(gate: Tensor, up: Tensor) -> None:
    check_floats(gate=gate, up=up)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise InvalidInput(f"gate is {gate.dtype} {tuple(gate.shape)} and up {up.dtype} {tuple(up.shape)}; must be alike, float")


def gate_up(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The activation of `gate`, a name in `ACTIVATIONS`, times `up`."""
    _check(gate, up)
    rows = (as_rows(x) for x in (gate, up))
    (y,) = _GATE_UP(*rows, activation)
    return y.view(gate.shape)


def _pair_defined(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor]:
    return (ACTIVATIONS[activation](gate) * up,)


def _run_pair(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor]:
    if kernels_run_on(gate):
        return (kernels.gate_up.forward(gate, up, activation),)
    return (_pair_defined(gate, up, activation)[0].contiguous(),)


def _gradients(dy: Tensor, y: None, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(gate.dtype, torch.float32)
    dy, g, u = dy.to(wide), gate.to(wide), up.to(wide)
    value, slope = _with_slope(g, activation)
    return (dy * u * slope).to(gate.dtype), (dy * value).to(gate.dtype)


def _with_slope(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """An activation and its derivative."""
    if activation == "silu":
        s = torch.sigmoid(x)
        return x * s, s * (1 + x * (1 - s))
    if activation == "relu":
        return torch.where(x <= 0, 0.0, x), (x > 0).to(x.dtype)
    if activation == "gelu":
        half = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return x * half, half + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    # (1 + tanh z) / 2 is the logistic function of 2 z
    s = torch.sigmoid(2 * _TANH * (x + _CUBIC * x * x * x))
    return x * s, s + x * s * (1 - s) * 2 * _TANH * (1 + 3 * _CUBIC * x * x)


def _run_gradients(dy: Tensor, y: None, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if kernels_run_on(gate):
        return kernels.gate_up.gradients(dy, gate, up, activation)
    return _gradients(dy, None, gate, up, activation)


_GATE_UP = Operation(
    "gate_up", "Tensor gate, Tensor up, str activation", results=1, run=_run_pair, defined=_pair_defined,
    run_gradients=_run_gradients, gradients=_gradients, fake=lambda gate, *_: (gate.new_empty(gate.shape),),
    fake_gradients=lambda dy, y, gate, up, _: (gate.new_empty(gate.shape), up.new_empty(up.shape)), given_to={0: 0, 1: 1},
    unused=frozenset((0,)),
)  # fmt: skip
_GATE_QUANTISED = define(
    "gate_quantised(Tensor gate, Tensor up, str activation, str out, Tensor? scale) -> (Tensor, Tensor)", _run_quantised,
    lambda gate, up, activation, out, scale: fake_rows(gate, out),
)  # fmt: skip
