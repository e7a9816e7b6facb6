"""RMS norm of gated numbers, before or after the gate, each group of a row by itself: the norm behind a recurrence.

Mamba-2 gates first, and normalises x silu(z) in groups; a gated delta net normalises each head, and gates after it.

Dao and Gu, Transformers are SSMs, arXiv:2405.21060; Yang et al., Gated Delta Networks, arXiv:2412.06464.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.errors import InvalidInput
from rooftile.fused import kernels
from rooftile.fused.differentiable import Operation
from rooftile.fused.where import check_floats, kernels_run_on
from rooftile.numerics.quantised_rows import as_rows
from rooftile.runtime.arguments import check_count, check_flag, check_number
from rooftile.runtime.words import answers_foreign_words

# the longest groups that a program holds in registers: with its gate, and for the gradient
LONGEST, LONGEST_OF_GRADIENT = 1 << 14, 1 << 13


@answers_foreign_words
def rms_norm_gated(
    x: Tensor,  # (..., size)
    gate: Tensor,  # (..., size)
    weight: Tensor,  # (size,), or (size / groups,)
    *,
    eps: float = 1e-5,
    gate_first: bool = True,
    groups: int = 1,
) -> Tensor:
    """RMS norm of each group of a row and a gate through silu: norm(x silu(gate)) weight, or norm(x) weight silu(gate).

    It computes in fp32 (fp64 for float64), rounds once, and has gradients for all three tensors.

    Args:
        x: (..., size), float, any strides.
        gate: as x; rows may be strided, as a part of a projection is.
        weight: (size,), or (size / groups,) where the groups share it, as the heads of a gated delta net do.
        eps: added to the mean square.
        gate_first: whether x is gated before the norm (Mamba-2), or after it (gated delta net).
        groups: equal parts of a row, each with a mean square of its own.

    Returns:
        (..., size) in the dtype of x.

    Raises:
        InvalidInput: shapes or dtypes do not go together.

    Example:
        >>> rms_norm_gated(torch.randn(2, 5, 64), torch.randn(2, 5, 64), torch.ones(64), groups=4).shape
        torch.Size([2, 5, 64])
    """
    check_floats(x=x, gate=gate, weight=weight)
    groups, eps = check_count("groups", groups), check_number("eps", eps)
    if gate.shape != x.shape or gate.dtype != x.dtype:
        raise InvalidInput(f"gate is {gate.dtype} {tuple(gate.shape)} and x {x.dtype} {tuple(x.shape)}; must be alike")
    size = x.shape[-1]
    if size % groups:
        raise InvalidInput(f"groups is {groups} and x {tuple(x.shape)}; groups must divide its last axis")
    if tuple(weight.shape) not in ((size,), (size // groups,)):
        raise InvalidInput(f"weight is {tuple(weight.shape)}; must be ({size},), or ({size // groups},) for all groups")
    (y,) = _GATED_NORM(as_rows(x), as_rows(gate), weight, groups, check_flag("gate_first", gate_first), eps)
    return y.view(x.shape)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_groups(x: Tensor, gate: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x and the gate as (rows, groups, n), and the weight as (groups, n), or (1, n) where they share it."""
    n = x.shape[1] // groups
    # a row without numbers has no length to unflatten by
    rows, shared = (-1, -1) if n else (x.shape[0], 1)
    return _wide(x).reshape(rows, groups, n), _wide(gate).reshape(rows, groups, n), _wide(weight).reshape(shared, n)


def _defined(x: Tensor, gate: Tensor, weight: Tensor, groups: int, gate_first: bool, eps: float) -> tuple[Tensor]:
    value, z, w = _of_groups(x, gate, weight, groups)
    opened = functional.silu(z)
    value = value * opened if gate_first else value
    y = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * w
    return ((y if gate_first else y * opened).reshape(x.shape).to(x.dtype),)


def _gradients(
    dy: Tensor, y: None, x: Tensor, gate: Tensor, weight: Tensor, groups: int, gate_first: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """With u = x silu(z) or x, h = u / sqrt(mean u² + eps) and g = dy w, or dy w silu(z): du = (g - h mean(g h)) / sqrt(...)."""
    value, z, w = _of_groups(x, gate, weight, groups)
    d = _wide(dy).reshape(value.shape)
    s = torch.sigmoid(z)
    opened, slope = z * s, s * (1 + z * (1 - s))
    u = value * opened if gate_first else value
    r = torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    h = u * r
    g = d * w if gate_first else d * w * opened
    du = r * (g - h * (g * h).mean(-1, keepdim=True))
    dx, dgate = (du * opened, du * value * slope) if gate_first else (du, d * h * w * slope)
    dw = (d * h if gate_first else d * h * opened).sum(0)
    dw = dw if weight.shape[0] == x.shape[1] else dw.sum(0)
    return dx.reshape(x.shape).to(x.dtype), dgate.reshape(x.shape).to(gate.dtype), dw.reshape(weight.shape).to(weight.dtype)


def _run(x: Tensor, gate: Tensor, weight: Tensor, groups: int, gate_first: bool, eps: float) -> tuple[Tensor]:
    if _kernels_run_on(x, LONGEST * groups):
        return (kernels.gated_norm.forward(x, gate, weight, groups, gate_first, eps),)
    return (_defined(x, gate, weight, groups, gate_first, eps)[0].contiguous(),)


def _run_gradients(
    dy: Tensor, y: None, x: Tensor, gate: Tensor, weight: Tensor, groups: int, gate_first: bool, eps: float
) -> tuple[Tensor, ...]:  # fmt: skip
    if _kernels_run_on(x, LONGEST_OF_GRADIENT * groups):
        return kernels.gated_norm.gradients(dy, x, gate, weight, groups, gate_first, eps)
    return _gradients(dy, None, x, gate, weight, groups, gate_first, eps)


def _kernels_run_on(x: Tensor, longest: int) -> bool:
    return kernels_run_on(x) and 0 < x.shape[1] <= longest


_GATED_NORM = Operation(
    "gated_norm", "Tensor x, Tensor gate, Tensor weight, int groups, bool gate_first, float eps", results=1, run=_run,
    defined=_defined, run_gradients=_run_gradients, gradients=_gradients, fake=lambda x, *_: (x.new_empty(x.shape),),
    fake_gradients=lambda dy, y, x, gate, weight, *_: tuple(each.new_empty(each.shape) for each in (x, gate, weight)),
    given_to={0: 0, 1: 1, 2: 2}, unused=frozenset((0,)),
)  # fmt: skip
