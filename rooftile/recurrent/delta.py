"""The gated delta rule: a recurrence that takes what a key recalls out of the state before it writes the key's value.

    S_t = exp(g_t) S_{t-1},  u_t = beta_t (v_t - S_t^T k_t),  S_t += k_t u_t^T,  y_t = scale S_t^T q_t

In a piece the u_t depend on each other: with M_ts = beta_t <k_t, k_s exp(sum of g over s+1..t)> for s < t they solve the lower
triangular system (1 + M) U = beta (V - exp(sum of g) K S), exactly, in fp32 (the WY form). The exponents are masked before the
exponential.

Yang et al., Gated Delta Networks, arXiv:2412.06464; g for each channel: Kimi Delta Attention, arXiv:2510.26692.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.recurrent.arguments import (
    BACKENDS,
    check_dtypes,
    check_groups,
    check_rows,
    check_shapes,
    check_state,
    narrowed,
)  # fmt: skip
from rooftile.recurrent.operator import Operators
from rooftile.recurrent.rule import Given, Rule, repeated, wide_dtype
from rooftile.recurrent.split.carries import Matrix
from rooftile.recurrent.split.context import follows_context
from rooftile.recurrent.split.heads import run_by_heads
from rooftile.recurrent.split.meeting import agree
from rooftile.recurrent.split.part import part_of, placed
from rooftile.recurrent.split.plan import Plan, planned
from rooftile.recurrent.words import CALL
from rooftile.runtime.arguments import check_backend, check_flag, shown
from rooftile.runtime.words import answers_with

# is added to the square of a key's length
EPS = 1e-6


@follows_context("q", "k", "v", "g", "beta")
@answers_with(CALL)
def gated_delta(
    q: Tensor,  # (B, T, Hk, Dk)
    k: Tensor,  # (B, T, Hk, Dk)
    v: Tensor,  # (B, T, Hv, Dv)
    g: Tensor,  # (B, T, Hv) or (B, T, Hv, Dk)
    beta: Tensor,  # (B, T, Hv)
    *,
    scale: float | None = None,
    qk_norm: bool = True,
    state: Tensor | None = None,  # (B, Hv, Dk, Dv)
    return_state: bool = True,
    cu: Tensor | None = None,
    group: Any = None,
    method: str = "auto",
    validate: bool = False,
    backend: str | None = None,
) -> Any:
    """The gated delta rule: S_t = exp(g_t) S_{t-1} (1 - beta_t k_t k_t^T) + beta_t k_t v_t^T, y_t = scale S_t^T q_t.

    Sums and states are in fp32, or in fp64 for float64 tensors. g = 0 is DeltaNet.

    Args:
        q, k: queries and keys (B, T, Hk, Dk), float32, bfloat16, float16 or float64, any strides; with cu (total, Hk, Dk).
        v: values (B, T, Hv, Dv). Hk divides Hv, and each key head serves Hv / Hk neighbouring value heads.
        g: the logarithm of the decay, at most 0: (B, T, Hv) for each head (gated delta net), or (B, T, Hv, Dk) for each channel
            of the keys (Kimi Delta Attention), in the dtype of q or in float32.
        beta: how much of a value is written, (B, T, Hv), in the dtype of q or in float32.
        scale: a factor of the queries; Dk^-0.5 if None.
        qk_norm: whether queries and keys are divided by sqrt(sum of squares + 1e-6).
        state: the state before the first token (B, Hv, Dk, Dv), float32 (float64 for float64); None for zeros. Gradients flow to
            it.
        return_state: whether the state after the last token is returned, too.
        cu: offsets (B + 1,), int32, of packed sequences; each has a state of its own.
        group: a process group or a one-dimensional DeviceMesh whose ranks hold the sequence, each a contiguous range of any
            length. Tensors of tokens are then this rank's, cu has the whole pack's offsets, and states are the same on every
            rank. The gradients of what all ranks hold, the first state too, are this rank's share: their sum is the whole.
        method: with a group: "scan" sends states and the matrices that a rank's tokens are on them; "heads" exchanges tokens for
            heads, and needs key heads that the ranks divide; "auto" takes what costs less: `gated_delta_plan` says which and why.
        validate: with a group: check over it that every rank was given the same problem; costs a small all-gather. Where one
            rank refuses its arguments, all ranks raise.
        backend: "triton" (kernels, for g of each head), "tiled" (pieces, in plain operations) or "eager" (token by token, with
            gradients of gradients); None or "auto" takes the fastest that runs. In kernels a NaN
            reaches the up to 63 tokens before its own, too.

    Returns:
        y (B, T, Hv, Dv) in the dtype of v; with return_state (y, state), state (B, Hv, Dk, Dv) in float32. Gradients flow from
        both.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.

    Example:
        >>> q, k, v = torch.randn(2, 50, 2, 64), torch.randn(2, 50, 2, 64), torch.randn(2, 50, 4, 64)
        >>> y, state = gated_delta(q, k, v, -torch.rand(2, 50, 4), torch.rand(2, 50, 4))
        >>> y.shape, state.shape
        (torch.Size([2, 50, 4, 64]), torch.Size([2, 4, 64, 64]))

    Yang et al., Gated Delta Networks, arXiv:2412.06464.
    """
    q, k, v = narrowed(q, k, v)
    sizes, options = _checked(q, k, v, g, beta, scale, qk_norm, "B T" if cu is None else "total")
    keeps = check_flag("return_state", return_state)
    check_flag("validate", validate)
    part, cu = placed("gated_delta", group, cu, q)
    count = sizes["B"] if cu is None else cu.shape[0] - 1
    state = check_state(state, "state", (count, sizes["Hv"], sizes["Dk"], sizes["Dv"]), wide_dtype(q), q)
    chosen = check_backend(backend, BACKENDS)
    if part is not None and planned(part, sizes, q, g, method).method == "heads":
        tensors = dict(zip(OPERATORS.rule.tokens, (q, k, v, g, beta), strict=True))
        agree(part, "gated_delta by heads", tensors, {"state": state}, options=options, backend=chosen, return_state=keeps)
        y, last = run_by_heads(
            part, (q, k, v, g, beta), state, cu, lambda x, first, cu: OPERATORS(x, (), first, cu, options, chosen), keeps
        )
    else:
        y, last = OPERATORS((q, k, v, g, beta), (), state, cu, options, chosen, part, keeps)
    return (y, last) if keeps else y


@answers_with(CALL)
def gated_delta_plan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, group: Any, cu: Tensor | None = None, method: str = "auto"
) -> Plan:
    """Says how `gated_delta` with a group computes such tensors of this rank: method, bytes that a rank sends, and why.

    Nothing is computed, and no rank waits.

    Args:
        q, k, v, g, group, cu, method: as in `gated_delta`.

    Example:
        >>> print(gated_delta_plan(q, k, v, g, group=group))      # doctest: +SKIP
        heads: sends 304,349,184 bytes, and has 0.25 of one device's FLOPs: states with matrices would send ...
    """
    sizes, _ = _checked(q, k, v, g, g if g.ndim < q.ndim else g[..., 0], None, True, "B T" if cu is None else "total")
    return planned(part_of("gated_delta", group, cu, q), sizes, q, g, method)


@answers_with(CALL)
def gated_delta_step(
    state: Tensor,  # (rows, Hv, Dk, Dv)
    q: Tensor,  # (S, Hk, Dk)
    k: Tensor,  # (S, Hk, Dk)
    v: Tensor,  # (S, Hv, Dv)
    g: Tensor,  # (S, Hv) or (S, Hv, Dk)
    beta: Tensor,  # (S, Hv)
    *,
    scale: float | None = None,
    qk_norm: bool = True,
    slots: Tensor | None = None,  # (S,)
) -> Tensor:
    """Reads one token of each of S sequences as `gated_delta` does, and changes their states in place.

    Args:
        state: states (rows, Hv, Dk, Dv), float32, bfloat16 or float16; sums are in float32, and rounded into it.
        q, k, v, g, beta, scale, qk_norm: as in `gated_delta`, without the axis of tokens.
        slots: the row of each sequence's state, int32 or int64; None for row n of sequence n. Tokens that share a row, such
            as padding, leave numbers of any of their states in it.

    Returns:
        y (S, Hv, Dv) in the dtype of v. It has no gradient.

    Example:
        >>> state, q, k, v = torch.zeros(3, 4, 64, 64), torch.randn(2, 2, 64), torch.randn(2, 2, 64), torch.randn(2, 4, 64)
        >>> gated_delta_step(state, q, k, v, -torch.rand(2, 4), torch.rand(2, 4), slots=torch.tensor([2, 0])).shape
        torch.Size([2, 4, 64])
    """
    q, k, v = narrowed(q, k, v)
    sizes, options = _checked(q, k, v, g, beta, scale, qk_norm, "S")
    slots = check_rows(state, "state", "rows Hv Dk Dv", slots, sizes)
    return OPERATORS.one(state, (q, k, v, g, beta), (), slots, options)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Any, qk_norm: Any, front: str
) -> tuple[dict[str, int], tuple[float, bool]]:  # fmt: skip
    by_channel = isinstance(g, Tensor) and g.ndim == len(front.split()) + 2
    sizes = check_shapes(
        {
            "q": (q, f"{front} Hk Dk"), "k": (k, f"{front} Hk Dk"), "v": (v, f"{front} Hv Dv"),
            "g": (g, f"{front} Hv Dk" if by_channel else f"{front} Hv"), "beta": (beta, f"{front} Hv"),
        },
        {},
    )  # fmt: skip
    check_groups(sizes["Hv"], sizes["Hk"], "Hv", "Hk")
    check_dtypes(q, {"k": k, "v": v}, {"g": g, "beta": beta})
    if scale is None:
        scale = sizes["Dk"] ** -0.5
    # torch.compile may have made a symbol of it
    if isinstance(scale, bool) or not isinstance(scale, (int, float, numbers.Real)) or not -math.inf < float(scale) < math.inf:
        raise InvalidInput(f"scale is {shown(scale)}; must be a finite number, or None")
    return sizes, (float(scale), check_flag("qk_norm", qk_norm))


def _heads(q: Tensor, k: Tensor, heads: int, scale: float, qk_norm: bool) -> tuple[Tensor, Tensor]:
    """Returns queries and keys in the wide dtype, normalised, one for each value head."""
    wide = wide_dtype(q)
    q, k = q.to(wide), k.to(wide)
    if qk_norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt() for x in (q, k))
    return repeated(q * scale, heads), repeated(k, heads)


def _token(tokens: Given, constants: Given, state: Tensor, options: Given) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = tokens
    wide = wide_dtype(q)
    q, k = _heads(q, k, v.shape[1], *options)
    decay = g.to(wide).exp()
    state = (decay[..., None, None] if g.ndim == 2 else decay[..., None]) * state.to(wide)
    written = beta.to(wide)[..., None] * (v.to(wide) - (state * k[..., None]).sum(-2))
    state = state + k[..., None] * written[..., None, :]
    return (state * q[..., None]).sum(-2), state


def _piece(tokens: Given, constants: Given, state: Tensor, options: Given) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = tokens
    wide, c = wide_dtype(q), q.shape[1]
    q, k = (x.transpose(1, 2) for x in _heads(q, k, v.shape[2], *options))  # (B, H, c, Dk)
    v, beta, state = v.to(wide).transpose(1, 2), beta.to(wide).transpose(1, 2), state.to(wide)
    # (B, H, c, 1 or Dk): the sum of exponents until each token, itself included; in fp64, so that differences keep small ones
    total = (g if g.ndim == 4 else g[..., None]).double().cumsum(1).transpose(1, 2)
    later = torch.ones(c, c, dtype=torch.bool, device=q.device).triu(1)[..., None]
    apart = (total[:, :, :, None] - total[:, :, None]).masked_fill(later, -math.inf).to(wide).exp()
    if g.ndim == 4:
        keys = torch.einsum("bhtd,bhsd,bhtsd->bhts", k, k, apart)
        queries = torch.einsum("bhtd,bhsd,bhtsd->bhts", q, k, apart)
    else:
        keys, queries = (torch.einsum("bhtd,bhsd->bhts", x, k) * apart[..., 0] for x in (k, q))
    system = (beta[..., None] * keys).tril(-1) + torch.eye(c, dtype=wide, device=q.device)
    decay = total.to(wide).exp()
    due = beta[..., None] * (v - (k * decay) @ state)
    written = torch.linalg.solve_triangular(system, due, upper=False, unitriangular=True)
    y = (q * decay) @ state + queries @ written
    to_end = (total[:, :, -1:] - total).to(wide).exp()
    last = decay[:, :, -1, :, None] * state + (k * to_end).transpose(2, 3) @ written
    return y.transpose(1, 2), last


OPERATORS = Operators(
    Rule(
        name="gated_delta",
        tokens=("q", "k", "v", "g", "beta"),
        constants=(),
        options=("float scale", "bool qk_norm"),
        token=_token,
        piece=_piece,
        length=32,
        like=2,
        kernels="rooftile.recurrent.kernels.delta",
        carry=Matrix(),
    )
)  # fmt: skip
