"""The selective scan of Mamba-1: a recurrence with one decay for each channel and each number of its state.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,  y_t = <C_t, h_t> + D x_t

The paper discretises B by a zero-order hold; the code that trained every checkpoint multiplies it by dt, and so does this.

Gu and Dao, Mamba, arXiv:2312.00752.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rooftile.recurrent.arguments import (
    BACKENDS,
    check_dtypes,
    check_groups,
    check_rows,
    check_shapes,
    check_state,
    check_values,
    narrowed,
)  # fmt: skip
from rooftile.recurrent.operator import Operators
from rooftile.recurrent.rule import Given, Rule, wide_dtype
from rooftile.recurrent.split.carries import Decay
from rooftile.recurrent.split.context import follows_context
from rooftile.recurrent.split.part import placed
from rooftile.recurrent.steps import FREE, steps_of
from rooftile.recurrent.words import CALL
from rooftile.runtime.arguments import check_backend, check_flag
from rooftile.runtime.words import answers_with


@follows_context("x", "dt", "B", "C", "z")
@answers_with(CALL)
def selective_scan(
    x: Tensor,  # (B, T, W)
    dt: Tensor,  # (B, T, W)
    A: Tensor,  # (W, N)
    B: Tensor,  # (B, T, N)
    C: Tensor,  # (B, T, N)
    *,
    D: Tensor | None = None,  # (W,)
    z: Tensor | None = None,  # (B, T, W)
    dt_bias: Tensor | None = None,  # (W,)
    softplus: bool = True,
    state: Tensor | None = None,  # (B, W, N)
    return_state: bool = True,
    cu: Tensor | None = None,
    group: Any = None,
    validate: bool = False,
    backend: str | None = None,
) -> Any:
    """The recurrence of Mamba-1: h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = <C_t, h_t> + D x_t, for each channel.

    With z, y_t is multiplied by silu(z_t). Steps, sums and states are in fp32, or in fp64 for float64 tensors.

    Args:
        x: inputs (B, T, W), float32, bfloat16, float16 or float64, any strides; with cu (total, W).
        dt: steps (B, T, W) before softplus, in the dtype of x or in float32.
        A: the rates of decay (W, N), at most 0.
        B, C: (B, T, N) in the dtype of x, one for all channels; or (B, T, G, N), each for W / G neighbouring channels.
        D: the weight of x in y, (W,).
        z: a gate (B, T, W), in the dtype of x.
        dt_bias: is added to dt, (W,).
        softplus: whether the step is softplus(dt + dt_bias), and not dt + dt_bias itself.
        state: the state before the first token (B, W, N), float32 (float64 for float64); None for zeros. Gradients flow to it.
        return_state: whether the state after the last token is returned, too.
        cu: offsets (B + 1,), int32, of packed sequences; each has a state of its own.
        group: a process group or a one-dimensional DeviceMesh whose ranks hold the sequence, each a contiguous range of any
            length. Tensors of tokens are then this rank's, cu has the whole pack's offsets, and states are the same on every
            rank. The gradients of what all ranks hold, the first state too, are this rank's share: their sum is the whole.
        validate: with a group: check over it that every rank was given the same problem; costs a small all-gather. Where one
            rank refuses its arguments, all ranks raise.
        backend: "triton" (kernels), "tiled" (plain operations, whose backward keeps one state in 64) or "eager" (with gradients
            of gradients); None or "auto" takes the fastest that runs.

    Returns:
        y (B, T, W) in the dtype of x; with return_state (y, state), state (B, W, N) in float32. Gradients flow from both.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.

    Example:
        >>> x, dt, A = torch.randn(2, 50, 96), torch.randn(2, 50, 96), -torch.rand(96, 16) - 0.1
        >>> y, state = selective_scan(x, dt, A, torch.randn(2, 50, 16), torch.randn(2, 50, 16))
        >>> y.shape, state.shape
        (torch.Size([2, 50, 96]), torch.Size([2, 96, 16]))

    Gu and Dao, Mamba, arXiv:2312.00752.
    """
    x, B, C, z = narrowed(x, B, C, z)
    front = "B T" if cu is None else "total"
    sizes = _checked(x, dt, A, B, C, D, z, dt_bias, front)
    flag = check_flag("softplus", softplus)
    if not flag and dt_bias is None:
        check_values("dt", dt, "at least 0")
    keeps = check_flag("return_state", return_state)
    check_flag("validate", validate)
    part, cu = placed("selective_scan", group, cu, x)
    count = sizes["B"] if cu is None else cu.shape[0] - 1
    state = check_state(state, "state", (count, sizes["W"], sizes["N"]), wide_dtype(x), x)
    y, last = OPERATORS((x, dt, B, C, z), (A, D, dt_bias), state, cu, (flag,), check_backend(backend, BACKENDS), part, keeps)
    return (y, last) if keeps else y


@answers_with(CALL)
def selective_scan_step(
    state: Tensor,  # (rows, W, N)
    x: Tensor,  # (S, W)
    dt: Tensor,  # (S, W)
    A: Tensor,  # (W, N)
    B: Tensor,  # (S, N)
    C: Tensor,  # (S, N)
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = True,
    slots: Tensor | None = None,  # (S,)
) -> Tensor:
    """Reads one token of each of S sequences as `selective_scan` does, and changes their states in place.

    Args:
        state: states (rows, W, N), float32, bfloat16 or float16; sums are in float32, and rounded into it.
        x, dt, A, B, C, D, z, dt_bias, softplus: as in `selective_scan`, without the axis of tokens.
        slots: the row of each sequence's state, int32 or int64; None for row n of sequence n. Tokens that share a row, such
            as padding, leave numbers of any of their states in it.

    Returns:
        y (S, W) in the dtype of x. It has no gradient.

    Example:
        >>> state, x, dt, A = torch.zeros(4, 96, 16), torch.randn(2, 96), torch.randn(2, 96), -torch.rand(96, 16) - 0.1
        >>> selective_scan_step(state, x, dt, A, torch.randn(2, 16), torch.randn(2, 16), slots=torch.tensor([3, 0])).shape
        torch.Size([2, 96])
    """
    x, B, C, z = narrowed(x, B, C, z)
    sizes = _checked(x, dt, A, B, C, D, z, dt_bias, "S")
    slots = check_rows(state, "state", "rows W N", slots, sizes)
    return OPERATORS.one(state, (x, dt, B, C, z), (A, D, dt_bias), slots, (check_flag("softplus", softplus),))


def _checked(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, front: str
) -> dict[str, int]:  # fmt: skip
    grouped = isinstance(B, Tensor) and B.ndim == len(front.split()) + 2
    own = f"{front} G N" if grouped else f"{front} N"
    shapes = {"x": (x, f"{front} W"), "dt": (dt, f"{front} W"), "A": (A, "W N"), "B": (B, own), "C": (C, own)}
    for name, given, axes in (("z", z, f"{front} W"), ("D", D, "W"), ("dt_bias", dt_bias, "W")):
        if given is not None:
            shapes[name] = given, axes
    sizes = check_shapes(shapes, {})
    if grouped:
        check_groups(sizes["W"], sizes["G"], "W")
    check_dtypes(x, {"B": B, "C": C, "z": z}, {"dt": dt, "A": A, "D": D, "dt_bias": dt_bias})
    check_values("A", A, "at most 0")
    return sizes


def _token(tokens: Given, constants: Given, state: Tensor, options: Given) -> tuple[Tensor, Tensor]:
    x, dt, B, C, z = tokens
    A, D, dt_bias = constants
    wide, W = wide_dtype(x), x.shape[1]
    x, B, C = x.to(wide), _by_channel(B.to(wide), W), _by_channel(C.to(wide), W)
    dt = steps_of(dt, dt_bias, (*options, *FREE), wide)
    state = (dt[..., None] * A.to(wide)).exp() * state.to(wide) + (dt * x)[..., None] * B
    y = (state * C).sum(-1)
    if D is not None:
        y = y + D.to(wide) * x
    return y if z is None else y * F.silu(z.to(wide)), state


def _by_channel(x: Tensor, W: int) -> Tensor:
    """Returns (B, N) or (B, G, N) as (B, 1 or W, N)."""
    return x[:, None] if x.ndim == 2 else x.repeat_interleave(W // x.shape[1], 1)


def _exponents(tokens: Given, constants: Given, options: Given) -> Tensor:
    """Returns the logarithm of the decays over tokens (rows, c, ...): (rows, W, N), in fp64."""
    (x, dt, *_), (A, _, dt_bias) = tokens, constants
    steps = steps_of(dt, dt_bias, (*options, *FREE), wide_dtype(x)).double().sum(1)
    return steps[..., None] * A.double()


OPERATORS = Operators(
    Rule(
        name="selective_scan",
        tokens=("x", "dt", "B", "C", "z?"),
        constants=("A", "D?", "dt_bias?"),
        options=("bool softplus",),
        token=_token,
        piece=None,
        length=64,
        kernels="rooftile.recurrent.kernels.selective",
        carry=Decay(3, _exponents),
    )
)  # fmt: skip
