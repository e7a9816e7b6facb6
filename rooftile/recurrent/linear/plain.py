"""The recurrence of dense or packed tensors in plain operations, and what a NaN among its inputs reaches.

A NaN or infinity of a key or value reaches the rows from its own on, and no others: it is zero in the sums, and NaN is
written to what sees it. So is one of a query or of an incoming gradient, on its way to keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from rooftile.recurrent.linear import by_chunks
from rooftile.recurrent.linear.by_chunks import RunningSums
from rooftile.recurrent.linear.problem import Recurrence
from rooftile.runtime.operators import transformed


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of all sums."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def forward(
    q: Tensor, k: Tensor, v: Tensor, state: RunningSums, projection: Tensor | None, cu: Tensor | None, problem: Recurrence
) -> tuple[Tensor, Tensor, RunningSums]:  # fmt: skip
    """o in the dtype of q, the sums of weights, and the last state."""
    projection = None if projection is None else projection.detach().to(wide_dtype(q))
    if cu is None:
        o, den, *last = _forward_dense(q, k, v, state, projection, problem)
    else:
        parts = []
        for (q_b, k_b, v_b), (own,) in _sequences(cu, (q, k, v), (state,)):
            parts.append(_forward_dense(q_b, k_b, v_b, own, projection, problem))
        like = (q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=wide_dtype(q)), q[..., 0].to(wide_dtype(q)), *state)
        o, den, *last = _joined(parts, 2, like)
    return o.to(q.dtype), den, RunningSums(*last)


def backward(
    do: Tensor, d_last: RunningSums, o: Tensor, den: Tensor, q: Tensor, k: Tensor, v: Tensor, state: RunningSums,
    projection: Tensor | None, cu: Tensor | None, problem: Recurrence,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of q, k and v in their dtypes, and of S and z; `d_last` has the gradients of the last state."""
    projection = None if projection is None else projection.to(wide_dtype(q))
    if cu is None:
        found = list(_backward_dense(do, d_last, o, den, q, k, v, state, projection, problem))
    else:
        parts = []
        for (do_b, o_b, den_b, q_b, k_b, v_b), (last, own) in _sequences(cu, (do, o, den, q, k, v), (d_last, state)):
            parts.append(_backward_dense(do_b, last, o_b, den_b, q_b, k_b, v_b, own, projection, problem))
        found = _joined(parts, 3, (q, k, v, state.s, state.z))
    dq, dk, dv, ds, dz = found
    ds, dz = (x.clone(memory_format=torch.contiguous_format) for x in (ds, dz))
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous(), ds, dz


def _forward_dense(
    q: Tensor, k: Tensor, v: Tensor, state: RunningSums, projection: Tensor | None, problem: Recurrence
) -> tuple[Tensor, ...]:  # fmt: skip
    q, k, v = (x.to(wide_dtype(x)) for x in (q, k, v))
    lost_k, lost_v = ~k.isfinite().all(-1), ~v.isfinite()  # (B, S, Hk), (B, S, Hk, Dv)
    # a transform of torch.func may not ask for numbers
    if transformed() or not (bool(lost_k.any()) or bool(lost_v.any())):
        o, den, last = by_chunks.forward(q, k, v, state, projection, problem)
        return o, den, *last
    k = k.masked_fill(lost_k[..., None], 0.0)
    o, den, (s, z, largest) = by_chunks.forward(q, k, v.masked_fill(lost_v, 0.0), state, projection, problem)
    group, T = q.shape[2] // k.shape[2], q.shape[1]
    seen_k, seen_v = (_seen(x, T, problem.causal).repeat_interleave(group, 2) for x in (lost_k, lost_v))
    o = o + _poison(seen_v | seen_k[..., None], o)
    s = s + _poison((lost_v.any(1) | lost_k.any(1)[..., None])[:, :, None], s)
    return o, den + _poison(seen_k, den), s, z + _poison(lost_k.any(1)[..., None], z), largest


def _backward_dense(
    do: Tensor, d_last: RunningSums, o: Tensor, den: Tensor, q: Tensor, k: Tensor, v: Tensor, state: RunningSums,
    projection: Tensor | None, problem: Recurrence,
) -> tuple[Tensor, ...]:  # fmt: skip
    do, o, q, k, v = (x.to(wide_dtype(q)) for x in (do, o, q, k, v))
    lost_q = ~(torch.cat((q, do, o, den[..., None]), -1).isfinite().all(-1))  # (B, T, H)
    lost_k = ~(k.isfinite().all(-1) & v.isfinite().all(-1))  # (B, S, Hk)
    if not (bool(lost_q.any()) or bool(lost_k.any())):
        return by_chunks.backward(do, d_last, o, den, q, k, v, state, projection, problem)
    do, o, q = (x.masked_fill(lost_q[..., None], 0.0) for x in (do, o, q))
    k, v = (x.masked_fill(lost_k[..., None], 0.0) for x in (k, v))
    dq, dk, dv, ds, dz = by_chunks.backward(do, d_last, o, den.masked_fill(lost_q, 1.0), q, k, v, state, projection, problem)
    group = q.shape[2] // k.shape[2]
    rows = lost_q.unflatten(2, (-1, group)).any(-1)  # (B, T, Hk)
    dq = dq + _poison((_seen(lost_k, q.shape[1], problem.causal).repeat_interleave(group, 2) | lost_q)[..., None], dq)
    # a key is reached by the rows from its own on
    reached = _seen(rows.flip(1), k.shape[1], problem.causal).flip(1) | lost_k
    return (
        dq, dk + _poison(reached[..., None], dk), dv + _poison(reached[..., None], dv),
        ds + _poison(rows.any(1)[..., None, None], ds), dz + _poison(rows.any(1)[..., None], dz),
    )  # fmt: skip


def _seen(lost: Tensor, rows: int, causal: bool) -> Tensor:
    """For each row, whether a token that it sees is lost: (B, S, Hk, ...) to (B, rows, Hk, ...)."""
    if causal:
        return lost.cumsum(1) > 0
    return lost.any(1, keepdim=True).expand(-1, rows, *lost.shape[2:])


def _poison(lost: Tensor, like: Tensor) -> Tensor:
    return torch.where(lost, math.nan, 0.0).to(like.dtype)


def _sequences(
    cu: Tensor, packed: tuple[Tensor, ...], states: tuple[RunningSums, ...]
) -> Iterator[tuple[list[Tensor], list[RunningSums]]]:
    """Yields each sequence's rows, as a batch of one, and its states."""
    for b, (start, stop) in enumerate(pairwise(cu.tolist())):
        yield [x[None, start:stop] for x in packed], [RunningSums(*(x[b : b + 1] for x in state)) for state in states]


def _joined(parts: list[tuple[Tensor, ...]], packed: int, like: tuple[Tensor, ...]) -> list[Tensor]:
    """The results of all sequences: the first `packed` of them back to back, the others as a batch."""
    if not parts:
        return [torch.zeros_like(x) for x in like]
    columns = list(zip(*parts, strict=True))
    return [torch.cat(c, 1)[0] for c in columns[:packed]] + [torch.cat(c) for c in columns[packed:]]
