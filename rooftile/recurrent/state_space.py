"""The state-space model of Mamba-2: a recurrence with one decay for each head, computed as products of matrices by pieces.

    a_t = exp(dt_t A),  S_t = a_t S_{t-1} + dt_t x_t B_t^T,  y_t = S_t C_t + D x_t

Within a piece y = (C B^T * L) (dt x) with L_ts = exp(sum of dt A over s+1..t), 0 for t < s. The exponent is masked before the
exponential: above the diagonal it is positive and may overflow, and 0 times infinity is the NaN of the gradient. Sums of
exponents are in fp64, so that the difference of two large sums keeps the bits of small ones; the exponential is in fp32.

Dao and Gu, Transformers are SSMs, arXiv:2405.21060.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftile.recurrent.arguments import (
    BACKENDS,
    check_dtypes,
    check_groups,
    check_limits,
    check_rows,
    check_shapes,
    check_state,
    check_values,
    narrowed,
)  # fmt: skip
from rooftile.recurrent.operator import Operators
from rooftile.recurrent.rule import Given, Rule, repeated, wide_dtype
from rooftile.recurrent.split.carries import Decay
from rooftile.recurrent.split.context import follows_context
from rooftile.recurrent.split.part import part_of, placed
from rooftile.recurrent.split.plan import Plan, plan_ssd
from rooftile.recurrent.steps import UNLIMITED, steps_of
from rooftile.recurrent.words import CALL
from rooftile.runtime.arguments import check_backend, check_flag
from rooftile.runtime.words import answers_with


@follows_context("x", "dt", "B", "C", "z")
@answers_with(CALL)
def ssd(
    x: Tensor,  # (B, T, H, P)
    dt: Tensor,  # (B, T, H)
    A: Tensor,  # (H,)
    B: Tensor,  # (B, T, G, N)
    C: Tensor,  # (B, T, G, N)
    *,
    D: Tensor | None = None,  # (H,) or (H, P)
    z: Tensor | None = None,  # (B, T, H, P)
    dt_bias: Tensor | None = None,  # (H,)
    softplus: bool = True,
    dt_limit: tuple[float, float] = UNLIMITED,
    state: Tensor | None = None,  # (B, H, P, N)
    return_state: bool = True,
    cu: Tensor | None = None,
    group: Any = None,
    validate: bool = False,
    backend: str | None = None,
) -> Any:
    """The recurrence of Mamba-2: S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t.

    With z, y_t is multiplied by silu(z_t). Steps, sums and states are in fp32, or in fp64 for float64 tensors. The result does
    not depend on how the tokens are cut into calls, if each goes on from the state of the one before.

    Args:
        x: inputs (B, T, H, P), float32, bfloat16, float16 or float64, any strides; with cu (total, H, P).
        dt: steps (B, T, H) before softplus, in the dtype of x or in float32.
        A: the rate of decay (H,), at most 0.
        B, C: (B, T, G, N) in the dtype of x; G divides H, and each group serves H / G neighbouring heads.
        D: the weight of x in y, (H,) or (H, P).
        z: a gate (B, T, H, P), in the dtype of x.
        dt_bias: is added to dt, (H,).
        softplus: whether the step is softplus(dt + dt_bias), and not dt + dt_bias itself.
        dt_limit: steps are clamped to it, after softplus.
        state: the state before the first token (B, H, P, N), float32 (float64 for float64); None for zeros. Gradients flow to it.
        return_state: whether the state after the last token is returned, too.
        cu: offsets (B + 1,), int32, of packed sequences; each has a state of its own.
        group: a process group or a one-dimensional DeviceMesh whose ranks hold the sequence, each a contiguous range of any
            length. Tensors of tokens are then this rank's, cu has the whole pack's offsets, and states are the same on every
            rank. The gradients of what all ranks hold, the first state too, are this rank's share: their sum is the whole.
        validate: with a group: check over it that every rank was given the same problem; costs a small all-gather. Where one
            rank refuses its arguments, all ranks raise.
        backend: "triton" (kernels, gradients too), "tiled" (pieces, in plain operations) or "eager" (token by
            token, with gradients of gradients); None or "auto" takes the fastest that runs. In kernels a NaN reaches the up to
            63 tokens before its own, too.

    Returns:
        y (B, T, H, P) in the dtype of x; with return_state (y, state), state (B, H, P, N) in float32. Gradients flow from both.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.

    Example:
        >>> x, dt, A = torch.randn(2, 100, 8, 64), torch.randn(2, 100, 8), -torch.rand(8) - 0.1
        >>> B, C = torch.randn(2, 100, 1, 128), torch.randn(2, 100, 1, 128)
        >>> y, state = ssd(x, dt, A, B, C)
        >>> y.shape, state.shape
        (torch.Size([2, 100, 8, 64]), torch.Size([2, 8, 64, 128]))

    Dao and Gu, Transformers are SSMs, arXiv:2405.21060.
    """
    x, B, C, z = narrowed(x, B, C, z)
    front = "B T" if cu is None else "total"
    shapes = {
        "x": (x, f"{front} H P"),
        "dt": (dt, f"{front} H"),
        "A": (A, "H"),
        "B": (B, f"{front} G N"),
        "C": (C, f"{front} G N"),
    }
    sizes = _checked(shapes, D, z, dt_bias, front)
    check_dtypes(x, {"B": B, "C": C, "z": z}, {"dt": dt, "A": A, "D": D, "dt_bias": dt_bias})
    options = check_flag("softplus", softplus), *check_limits(dt_limit)
    check_values("A", A, "at most 0")
    if not softplus and dt_bias is None:
        check_values("dt", dt, "at least 0")
    keeps = check_flag("return_state", return_state)
    check_flag("validate", validate)
    part, cu = placed("ssd", group, cu, x)
    count = sizes["B"] if cu is None else cu.shape[0] - 1
    state = check_state(state, "state", (count, sizes["H"], sizes["P"], sizes["N"]), wide_dtype(x), x)
    y, last = OPERATORS((x, dt, B, C, z), (A, D, dt_bias), state, cu, options, check_backend(backend, BACKENDS), part, keeps)
    return (y, last) if keeps else y


@answers_with(CALL)
def ssd_plan(x: Tensor, B: Tensor, *, group: Any, cu: Tensor | None = None) -> Plan:
    """Says what `ssd` with a group costs for such tensors of this rank: bytes that a rank sends, and its part of the FLOPs.

    Nothing is computed, and no rank waits.

    Args:
        x, B, group, cu: as in `ssd`.

    Example:
        >>> print(ssd_plan(x, B, group=group))      # doctest: +SKIP
        scan: sends 6,291,456 bytes, and has 0.29 of one device's FLOPs: a state is smaller than the tokens that lead to it
    """
    front = "B T" if cu is None else "total"
    sizes = check_shapes({"x": (x, f"{front} H P"), "B": (B, f"{front} G N")}, {})
    check_groups(sizes["H"], sizes["G"])
    part = part_of("ssd", group, cu, x)
    rows = 1 if part.cu is not None else sizes["B"]
    return plan_ssd(part.ranks.count, rows, sizes["H"], sizes["P"], sizes["N"], sizes["G"])


@answers_with(CALL)
def ssd_step(
    state: Tensor,  # (rows, H, P, N)
    x: Tensor,  # (S, H, P)
    dt: Tensor,  # (S, H)
    A: Tensor,  # (H,)
    B: Tensor,  # (S, G, N)
    C: Tensor,  # (S, G, N)
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = True,
    dt_limit: tuple[float, float] = UNLIMITED,
    slots: Tensor | None = None,  # (S,)
) -> Tensor:
    """Reads one token of each of S sequences as `ssd` does, and changes their states in place.

    Args:
        state: states (rows, H, P, N), float32, bfloat16 or float16; sums are in float32, and rounded into it.
        x, dt, A, B, C, D, z, dt_bias, softplus, dt_limit: as in `ssd`, without the axis of tokens.
        slots: the row of each sequence's state, int32 or int64; None for row n of sequence n. Tokens that share a row, such
            as padding, leave numbers of any of their states in it.

    Returns:
        y (S, H, P) in the dtype of x. It has no gradient.

    Example:
        >>> state, x, dt, A = torch.zeros(4, 8, 64, 128), torch.randn(2, 8, 64), torch.randn(2, 8), -torch.rand(8) - 0.1
        >>> ssd_step(state, x, dt, A, torch.randn(2, 1, 128), torch.randn(2, 1, 128), slots=torch.tensor([3, 0])).shape
        torch.Size([2, 8, 64])
    """
    x, B, C, z = narrowed(x, B, C, z)
    shapes = {"x": (x, "S H P"), "dt": (dt, "S H"), "A": (A, "H"), "B": (B, "S G N"), "C": (C, "S G N")}
    sizes = _checked(shapes, D, z, dt_bias, "S")
    check_dtypes(x, {"B": B, "C": C, "z": z}, {"dt": dt, "A": A, "D": D, "dt_bias": dt_bias})
    options = check_flag("softplus", softplus), *check_limits(dt_limit)
    slots = check_rows(state, "state", "rows H P N", slots, sizes)
    return OPERATORS.one(state, (x, dt, B, C, z), (A, D, dt_bias), slots, options)


def _checked(
    shapes: dict[str, tuple[Any, str]], D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, front: str
) -> dict[str, int]:  # fmt: skip
    if z is not None:
        shapes["z"] = z, f"{front} H P"
    if D is not None:
        shapes["D"] = D, "H P" if isinstance(D, Tensor) and D.ndim == 2 else "H"
    if dt_bias is not None:
        shapes["dt_bias"] = dt_bias, "H"
    sizes = check_shapes(shapes, {})
    check_groups(sizes["H"], sizes["G"])
    return sizes


def _token(tokens: Given, constants: Given, state: Tensor, options: Given) -> tuple[Tensor, Tensor]:
    x, dt, B, C, z = tokens
    A, D, dt_bias = constants
    wide, H = wide_dtype(x), x.shape[1]
    x, B, C, A = x.to(wide), repeated(B.to(wide), H), repeated(C.to(wide), H), A.to(wide)
    dt = steps_of(dt, dt_bias, options, wide)
    state = (dt * A).exp()[..., None, None] * state.to(wide) + (dt[..., None] * x)[..., None] * B[:, :, None]
    y = (state * C[:, :, None]).sum(-1)
    return _gated(y, x, D, z, wide), state


def _gated(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None, wide: torch.dtype) -> Tensor:
    if D is not None:
        y = y + (D if D.ndim == 2 else D[:, None]).to(wide) * x
    return y if z is None else y * F.silu(z.to(wide))


def _piece(tokens: Given, constants: Given, state: Tensor, options: Given) -> tuple[Tensor, Tensor]:
    x, dt, B, C, z = tokens
    A, D, dt_bias = constants
    wide, H = wide_dtype(x), x.shape[2]
    x, B, C, state = x.to(wide), B.to(wide), C.to(wide), state.to(wide)
    dt = steps_of(dt, dt_bias, options, wide)
    # (B, H, c): the sum of exponents until each token, itself included
    total = (dt.double() * A.double()).cumsum(1).transpose(1, 2)
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -math.inf).to(wide).exp()
    weights = torch.einsum("btgn,bsgn->bgts", C, B)
    weights = weights.repeat_interleave(H // B.shape[2], 1) * decay
    moved = x * dt[..., None]
    B, C = repeated(B, H), repeated(C, H)
    from_state = total.to(wide).exp().transpose(1, 2)
    y = torch.einsum("bhts,bshp->bthp", weights, moved)
    y = y + torch.einsum("bthn,bhpn->bthp", C * from_state[..., None], state)
    to_state = (total[..., -1:] - total).to(wide).exp().transpose(1, 2)
    last = from_state[:, -1, :, None, None] * state + torch.einsum("bthp,bthn->bhpn", moved * to_state[..., None], B)
    return _gated(y, x, D, z, wide), last


def _exponents(tokens: Given, constants: Given, options: Given) -> Tensor:
    """Returns the logarithm of the decay over tokens (rows, c, ...): (rows, H), in fp64."""
    (x, dt, *_), (A, _, dt_bias) = tokens, constants
    return (steps_of(dt, dt_bias, options, wide_dtype(x)).double() * A.double()).sum(1)


OPERATORS = Operators(
    Rule(
        name="ssd",
        tokens=("x", "dt", "B", "C", "z?"),
        constants=("A", "D?", "dt_bias?"),
        options=("bool softplus", "float low", "float high"),
        token=_token,
        piece=_piece,
        length=64,
        kernels="rooftile.recurrent.kernels.state_space",
        carry=Decay(2, _exponents),
    )
)  # fmt: skip
