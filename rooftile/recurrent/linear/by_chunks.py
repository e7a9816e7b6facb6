"""The chunked recurrence in plain operations: for CPUs, for fp64, and where Triton does not run.

With features f of queries and keys, and the factors exp(m) that some kinds have:

    M_t = max(M_{t-1}, m_t)                                    the running largest, kept with the state
    S_t = exp(M_{t-1} - M_t) S_{t-1} + exp(m_t - M_t) f(k_t) v_t^T
    z_t = exp(M_{t-1} - M_t) z_{t-1} + exp(m_t - M_t) f(k_t)
    o_t = f(q_t)^T S_t / f(q_t)^T z_t

Within a chunk the sums over keys are products of matrices, CHUNK x CHUNK at most; the state passes from chunk to chunk. The
factor exp(M_{t-1} - M_t) is a decay. All sums and the division are in fp32, or in fp64 for fp64 inputs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.recurrent.linear.features import features, gradient
from rooftile.recurrent.linear.problem import Recurrence

CHUNK = 128
# a sum of weights that is smaller counts as zero: its inverse, times gradients and values, must stay finite in fp32
EMPTY = 2.0**-110


class RunningSums(NamedTuple):
    """The sums over past keys: S (B, Hk, F, Dv), z (B, Hk, F), and M (B, Hk), which is -inf before the first key."""

    s: Tensor
    z: Tensor
    largest: Tensor


class _Chunk(NamedTuple):
    """The features of a chunk, and the weights between its tokens and the state; None where all weights are 1."""

    q: Tensor  # (B, c, Hk, G, F)
    k: Tensor  # (B, c, Hk, F)
    pairs: Tensor | None  # (B, Hk, c, c): query, key
    from_state: Tensor | None  # (B, c, Hk)
    to_state: Tensor | None  # (B, c, Hk)
    keep: Tensor | None  # (B, Hk): the decay of the state over the chunk
    largest: Tensor  # after the chunk


def forward(
    q: Tensor, k: Tensor, v: Tensor, state: RunningSums, projection: Tensor | None, problem: Recurrence
) -> tuple[Tensor, Tensor, RunningSums]:
    """o (B, T, H, Dv) and den (B, T, H), the sums of weights, in the wide dtype of all arguments; and the last state."""
    if problem.causal:
        return _causal(q, k, v, state, projection, problem)
    state = _whole_state(k, v, state, projection, problem)
    found = []
    for rows in q.split(CHUNK, 1):
        f = _grouped(features(rows, problem.feature, projection, problem.scale)[0], k.shape[2])
        found.append(_read(f, state, None))
    return *_normalised(found, q, v, problem), state


def _causal(
    q: Tensor, k: Tensor, v: Tensor, state: RunningSums, projection: Tensor | None, problem: Recurrence
) -> tuple[Tensor, Tensor, RunningSums]:
    found = []
    for rows, keys, values in zip(q.split(CHUNK, 1), k.split(CHUNK, 1), v.split(CHUNK, 1), strict=True):
        chunk = _chunk(rows, keys, state.largest, projection, problem)
        a = _pairs(chunk.q, chunk.k, chunk.pairs)  # (B, Hk, G, c, c)
        n, den = _read(chunk.q, state, chunk.from_state)
        n = n + torch.einsum("bhgts,bshd->bthgd", a, values)
        found.append((n, den + a.sum(-1).permute(0, 3, 1, 2)))
        state = _carried(state, chunk, values)
    return *_normalised(found, q, v, problem), state


def backward(
    do: Tensor, d_last: RunningSums, o: Tensor, den: Tensor, q: Tensor, k: Tensor, v: Tensor, state: RunningSums,
    projection: Tensor | None, problem: Recurrence,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, S and z; `d_last` has gradients of the last state. States are computed again, by chunks."""
    Hk = k.shape[2]
    dn, d_den = _divided(do, o, den, problem)
    if not problem.causal:
        return _backward_full(dn, d_den, d_last, q, k, v, state, projection, problem)
    steps = list(zip(*(x.split(CHUNK, 1) for x in (q, k, v, dn, d_den)), strict=True))
    before = []
    for rows, keys, values, _, _ in steps:
        chunk = _chunk(rows, keys, state.largest, projection, problem)
        before.append(state)
        state = _carried(state, chunk, values)
    ds, dz = d_last.s, d_last.z
    found = []
    for (rows, keys, values, dn_c, d_den_c), past in zip(reversed(steps), reversed(before), strict=True):
        chunk = _chunk(rows, keys, past.largest, projection, problem)
        dn_c, d_den_c = _grouped(dn_c, Hk), d_den_c.unflatten(-1, (Hk, -1))
        a = _pairs(chunk.q, chunk.k, chunk.pairs)
        da = torch.einsum("bthgd,bshd->bhgts", dn_c, values) + d_den_c.permute(0, 2, 3, 1)[..., None]
        da = _lower(da if chunk.pairs is None else da * chunk.pairs[:, :, None])
        df_q, df_k = torch.einsum("bhgts,bshf->bthgf", da, chunk.k), torch.einsum("bhgts,bthgf->bshf", da, chunk.q)
        dv = torch.einsum("bhgts,bthgd->bshd", a, dn_c)
        # through the state: what came into the chunk, and what goes out of it
        f_q, f_k = _weighted(chunk.q, chunk.from_state), _weighted(chunk.k, chunk.to_state)
        to_q = torch.einsum("bthgd,bhfd->bthgf", dn_c, past.s) + d_den_c[..., None] * past.z[:, None, :, None]
        to_k = torch.einsum("bshd,bhfd->bshf", values, ds) + dz[:, None]
        dv = dv + torch.einsum("bshf,bhfd->bshd", f_k, ds)
        if chunk.keep is not None:
            ds, dz = chunk.keep[..., None, None] * ds, chunk.keep[..., None] * dz
        ds = ds + torch.einsum("bthgf,bthgd->bhfd", f_q, dn_c)
        dz = dz + torch.einsum("bthgf,bthg->bhf", f_q, d_den_c)
        df_q = df_q + _weighted(to_q, chunk.from_state)
        df_k = df_k + _weighted(to_k, chunk.to_state)
        dq = gradient(rows, chunk.q.flatten(2, 3), df_q.flatten(2, 3), problem.feature, projection, problem.scale)
        dk = gradient(keys, chunk.k, df_k, problem.feature, projection, problem.scale)
        found.append((dq, dk, dv))
    dq, dk, dv = (torch.cat(parts, 1) for parts in zip(*reversed(found), strict=True))
    return dq, dk, dv, ds, dz


def _backward_full(
    dn: Tensor, d_den: Tensor, d_last: RunningSums, q: Tensor, k: Tensor, v: Tensor, state: RunningSums,
    projection: Tensor | None, problem: Recurrence,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Without a mask all queries read the last state, so its gradient is known before any key's."""
    Hk, kind, scale = k.shape[2], problem.feature, problem.scale
    first = state.largest
    state = _whole_state(k, v, state, projection, problem)
    ds, dz = d_last.s, d_last.z
    dq, dk, dv = [], [], []
    for rows, dn_c, d_den_c in zip(q.split(CHUNK, 1), dn.split(CHUNK, 1), d_den.split(CHUNK, 1), strict=True):
        f, _ = features(rows, kind, projection, scale)
        f_q, dn_c, d_den_c = _grouped(f, Hk), _grouped(dn_c, Hk), d_den_c.unflatten(-1, (Hk, -1))
        df = torch.einsum("bthgd,bhfd->bthgf", dn_c, state.s) + d_den_c[..., None] * state.z[:, None, :, None]
        dq.append(gradient(rows, f, df.flatten(2, 3), kind, projection, scale))
        ds = ds + torch.einsum("bthgf,bthgd->bhfd", f_q, dn_c)
        dz = dz + torch.einsum("bthgf,bthg->bhf", f_q, d_den_c)
    for keys, values in zip(k.split(CHUNK, 1), v.split(CHUNK, 1), strict=True):
        f, m = features(keys, kind, projection, scale)
        weight = None if m is None else exp_of_difference(m, state.largest[:, None])
        df = torch.einsum("bshd,bhfd->bshf", values, ds) + dz[:, None]
        dv.append(torch.einsum("bshf,bhfd->bshd", _weighted(f, weight), ds))
        dk.append(gradient(keys, f, _weighted(df, weight), kind, projection, scale))
    if problem.scaled:
        keep = exp_of_difference(first, state.largest)
        ds, dz = keep[..., None, None] * ds, keep[..., None] * dz
    return torch.cat(dq, 1), torch.cat(dk, 1), torch.cat(dv, 1), ds, dz


def _chunk(q: Tensor, k: Tensor, largest: Tensor, projection: Tensor | None, problem: Recurrence) -> _Chunk:
    f_q, _ = features(q, problem.feature, projection, problem.scale)
    f_k, m = features(k, problem.feature, projection, problem.scale)
    f_q = _grouped(f_q, k.shape[2])
    if m is None:
        return _Chunk(f_q, f_k, None, None, None, None, largest)
    # (B, c, Hk): for each token, the largest until there
    running = torch.cat((largest[:, None], m.detach()), 1).cummax(1).values[:, 1:]
    last = running[:, -1] if m.shape[1] else largest
    # behind the mask a weight may overflow, and is 0
    later = torch.ones(m.shape[1], m.shape[1], dtype=torch.bool, device=m.device).triu(1)
    apart = m.transpose(1, 2)[:, :, None] - running.transpose(1, 2)[..., None]
    pairs = apart.masked_fill(later, -math.inf).exp()
    return _Chunk(
        f_q, f_k, pairs, exp_of_difference(largest[:, None], running), (m - last[:, None]).exp(),
        exp_of_difference(largest, last), last,
    )  # fmt: skip


def _whole_state(k: Tensor, v: Tensor, state: RunningSums, projection: Tensor | None, problem: Recurrence) -> RunningSums:
    """The state after all keys."""
    parts = [features(keys, problem.feature, projection, problem.scale) for keys in k.split(CHUNK, 1)]
    f = torch.cat([part for part, _ in parts], 1)
    weight, s, z, largest = None, state.s, state.z, state.largest
    if problem.scaled and k.shape[1]:
        m = torch.cat([part for _, part in parts if part is not None], 1)
        largest = torch.maximum(m.detach().amax(1), state.largest)
        keep = exp_of_difference(state.largest, largest)
        weight, s, z = (m - largest[:, None]).exp(), keep[..., None, None] * s, keep[..., None] * z
    f = _weighted(f, weight)
    return RunningSums(s + torch.einsum("bshf,bshd->bhfd", f, v), z + f.sum(1), largest)


def _carried(state: RunningSums, chunk: _Chunk, v: Tensor) -> RunningSums:
    """The state after a chunk."""
    f = _weighted(chunk.k, chunk.to_state)
    s, z = torch.einsum("bshf,bshd->bhfd", f, v), f.sum(1)
    if chunk.keep is None:
        return RunningSums(state.s + s, state.z + z, chunk.largest)
    return RunningSums(chunk.keep[..., None, None] * state.s + s, chunk.keep[..., None] * state.z + z, chunk.largest)


def _read(f_q: Tensor, state: RunningSums, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sums over the state's keys: (B, c, Hk, G, Dv) and (B, c, Hk, G)."""
    f_q = _weighted(f_q, weight)
    return torch.einsum("bthgf,bhfd->bthgd", f_q, state.s), torch.einsum("bthgf,bhf->bthg", f_q, state.z)


def _normalised(found: list[tuple[Tensor, Tensor]], q: Tensor, v: Tensor, problem: Recurrence) -> tuple[Tensor, Tensor]:
    n = torch.cat([part for part, _ in found], 1).flatten(2, 3)
    den = torch.cat([part for _, part in found], 1).flatten(2, 3)
    if not problem.normalise:
        return n, den
    # a row whose weights are all 0 is 0
    empty = den.abs() < EMPTY
    return (n / den.masked_fill(empty, 1.0)[..., None]).masked_fill(empty[..., None], 0.0), den


def _divided(do: Tensor, o: Tensor, den: Tensor, problem: Recurrence) -> tuple[Tensor, Tensor]:
    """The gradients of numerator and denominator, (B, T, H, Dv) and (B, T, H)."""
    if not problem.normalise:
        return do, torch.zeros_like(den)
    empty = den.abs() < EMPTY
    dn = (do / den.masked_fill(empty, 1.0)[..., None]).masked_fill(empty[..., None], 0.0)
    return dn, -(dn * o).sum(-1)


def _pairs(q: Tensor, k: Tensor, weights: Tensor | None) -> Tensor:
    """The weights of a chunk's pairs, (B, Hk, G, c, c), 0 behind the mask."""
    a = torch.einsum("bthgf,bshf->bhgts", q, k)
    return _lower(a if weights is None else a * weights[:, :, None])


def _lower(a: Tensor) -> Tensor:
    later = torch.ones(a.shape[-2:], dtype=torch.bool, device=a.device).triu(1)
    return a.masked_fill(later, 0.0)


def _grouped(x: Tensor, heads: int) -> Tensor:
    """(B, c, H, ...) as (B, c, Hk, G, ...)."""
    return x.unflatten(2, (heads, -1))


def _weighted(f: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return f
    return f * weight.reshape(*weight.shape, *(1,) * (f.ndim - weight.ndim))


def exp_of_difference(x: Tensor, y: Tensor) -> Tensor:
    """exp(x - y), which is 0 for x = -inf, also where y is -inf too."""
    return torch.where(x == -math.inf, 0.0, (x - torch.where(x == -math.inf, 0.0, y)).exp())
