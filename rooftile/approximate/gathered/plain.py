"""Attention between gathered rows by plain operations: each group's rows are copied, and its pairs are a small table.

For CPUs without Triton's interpreter and for fp64; the same lists and results as the kernels have.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.approximate.gathered.lists import RowLists

Results = tuple[Tensor, Tensor, Tensor]


class _Pairs(NamedTuple):
    """The pairs of each group: g groups of w rows and n keys."""

    i: Tensor  # (R, B, H, g, w), places of queries, 0 where there is none
    j: Tensor  # (R, B, H, g, n)
    there: Tensor  # (R, B, H, g, w), which rows are there
    seen: Tensor  # (R, B, H, g, w, n)
    shares: Tensor | float  # 1 / N_ij


def forward(q: Tensor, k: Tensor, v: Tensor, lists: RowLists, scale: float) -> Results:
    """Returns o (B, T, H, Dv), and lse and outputs for the backward: see `attention.attend`."""
    pairs = _pairs(lists, q.shape[1], k.shape[1])
    x, values, lost_v = _scores(q, k, v, pairs, scale)
    top = x.amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    top = torch.where(top == -math.inf, 0.0, top)
    p = torch.exp(x - top) * pairs.shares
    total = p.sum(-1)
    none = total == 0
    safe = torch.where(none, 1.0, total)
    o = torch.einsum("rbhgij,rbhgjd->rbhgid", p, values) / safe[..., None]
    o = o.masked_fill(_any(pairs.seen & lost_v[..., None, :], -1)[..., None], math.nan)
    lse = _two_numbers(top[..., 0].masked_fill(none, -math.inf), safe)  # (R, B, H, g, w, 2)
    B, T, H = q.shape[:3]
    if not lists.joins:
        parts, lse = (_flat(y, lists.rows.shape[3]) for y in (o, lse))
        sums = _add_at(o, pairs, (B, T, H))
        counts = _add_at(pairs.there.to(o.dtype)[..., None], pairs, (B, T, H))
        return (sums / counts.clamp(min=1)).to(q.dtype), lse, parts.to(q.dtype)
    lses = _place(lse, pairs, (B, T, H), -math.inf)  # (R, B, T, H, 2)
    top = lses[..., 0].amax(0)
    alone = (top == -math.inf)[..., None]
    # a place without a row in a round has -inf twice
    rest = lses[..., 1].masked_fill(lses[..., 0] == -math.inf, 0.0)
    shares = torch.exp(lses[..., 0] - top.masked_fill(alone[..., 0], 0.0) + rest)
    total = torch.where(alone[..., 0], 1.0, shares.sum(0))
    joined = _two_numbers(top, total)
    rounds = _place(o, pairs, (B, T, H), 0.0)
    o = ((shares / total)[..., None] * rounds).sum(0)
    own = v.repeat_interleave(H // v.shape[2], dim=2)
    return torch.where(alone, own, o).to(q.dtype), joined, q.new_empty(0)


def _two_numbers(top: Tensor, total: Tensor) -> Tensor:
    """Returns lse = top + log total, and what its rounding lost, (..., 2); -inf and 0 for a top of -inf."""
    lse = top + total.log()
    return torch.stack([lse, torch.where(top == -math.inf, 0.0, total.log() - (lse - top))], -1)


def backward(do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, lists: RowLists, scale: float) -> Results:
    """Returns dq, dk and dv from do (B, T, H, Dv), and o and lse as the forward gave them for the backward."""
    pairs, (B, T, H), wide = _pairs(lists, q.shape[1], k.shape[1]), q.shape[:3], lse.dtype
    x, values, lost_v = _scores(q, k, v, pairs, scale)
    part = _taken(do.to(wide), pairs.i)
    if lists.joins:
        outputs, L = _taken(o.to(wide), pairs.i), _taken(lse, pairs.i)
    else:
        part = part / _taken(_add_at(pairs.there.to(wide)[..., None], pairs, (B, T, H)).clamp(min=1), pairs.i)
        outputs, L = (y.unflatten(3, pairs.i.shape[3:]) for y in (_padded(o.to(wide), pairs), _padded(lse, pairs)))
    L, rest = L[..., :1], L[..., 1:]
    none = L.isneginf()
    delta = (outputs * part).sum(-1, keepdim=True).masked_fill(none, 0.0)
    p = (torch.exp(x - torch.where(none, 0.0, L) - rest) * pairs.shares).masked_fill(~pairs.seen | none, 0.0)
    lost_do = ~part.isfinite().all(-1, keepdim=True)
    clean = torch.where(part.isfinite(), part, 0.0)
    dp = torch.einsum("rbhgid,rbhgjd->rbhgij", clean, values)
    # a NaN belongs to the pairs that see it
    ds = (p * (dp - delta) * scale).masked_fill(lost_do | lost_v[..., None, :], math.nan).masked_fill(~pairs.seen, 0.0)
    p = p.masked_fill(lost_do & pairs.seen, math.nan)
    own, keys = (torch.where(y.isfinite(), y, 0.0) for y in (_taken(q.to(wide), pairs.i), _taken(k.to(wide), pairs.j)))
    dq = _add_at(torch.einsum("rbhgij,rbhgjd->rbhgid", ds, keys), pairs, (B, T, H))
    dk = _add_at(torch.einsum("rbhgij,rbhgid->rbhgjd", ds, own), pairs, (B, k.shape[1], H), keys=True)
    dv = _add_at(torch.einsum("rbhgij,rbhgid->rbhgjd", p, clean), pairs, (B, k.shape[1], H), keys=True)
    if lists.joins:
        dv = dv + torch.where(lse[..., :1] == -math.inf, do.to(wide), 0.0)
    dk, dv = (y.unflatten(2, (x.shape[2], -1)).sum(3) for x, y in ((k, dk), (v, dv)))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _pairs(lists: RowLists, T: int, S: int) -> _Pairs:
    """The pairs of all groups. A place out of range is not there."""
    groups, device = lists.groups, lists.rows.device
    g = torch.arange(groups, device=device)[:, None]
    at = g * lists.width + torch.arange(lists.width, device=device)  # (g, w)
    j_at = (g - lists.before) * lists.key_width + torch.arange(lists.key_width * (1 + lists.before), device=device)
    if lists.kind == "chunks":
        j_at = j_at % (groups * lists.key_width)
    i, there = _listed(lists.rows, at, T)
    j, j_there = _listed(lists.keys, j_at, S)
    rows, keys = i[..., :, None] + (S - T), j[..., None, :]
    if lists.kind == "lists":
        seen = keys <= rows if lists.causal else (keys >= 0) | (rows >= 0)
    else:
        seen = keys < rows if lists.causal else keys != rows
    seen = seen & there[..., :, None] & j_there[..., None, :]
    if lists.lows is not None:
        low = _at(lists.lows[:, 0], at)
        seen = seen & (j_at[:, None, :] < at[:, :, None]) & (j_at[:, None, :] >= low[..., None])
    shares: Tensor | float = 1.0
    if lists.marks is not None:
        shares = 1.0 / sum((_again(lists, n, at, j_at, seen) for n in range(1, lists.marks.shape[1])), seen.int()).clamp(min=1)
    return _Pairs(i, j, there, seen, shares)


def _again(lists: RowLists, n: int, at: Tensor, j_at: Tensor, seen: Tensor) -> Tensor:
    """The seen pairs that the n-th round after theirs sees too."""
    assert lists.marks is not None
    of_i, of_j = _at(lists.marks[:, n], at)[..., :, None], _at(lists.marks[:, n], j_at)[..., None, :]
    if lists.lows is not None:
        return seen & (of_j < of_i) & (of_j >= _at(lists.lows[:, n], at)[..., :, None])
    return seen & ((of_i - of_j) % lists.groups <= 1)


def _at(x: Tensor, at: Tensor) -> Tensor:
    """Numbers of a list (R, B, H, N) at positions (g, w), any number where there is none."""
    return x[..., at.clamp(0, max(x.shape[-1] - 1, 0))] if x.shape[-1] else x.new_zeros(*x.shape[:-1], *at.shape)


def _listed(x: Tensor, at: Tensor, length: int) -> tuple[Tensor, Tensor]:
    place = _at(x, at).long()
    there = (at >= 0) & (at < x.shape[-1]) & (place >= 0) & (place < length)
    return torch.where(there, place, 0), there


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """Rows of x (B, S, Hk, D) at places (R, B, H, g, w): (R, B, H, g, w, D)."""
    if not x.shape[1]:
        return x.new_zeros(*places.shape, x.shape[-1])
    H = places.shape[2]
    b = torch.arange(x.shape[0], device=x.device)[:, None, None, None]
    h = torch.arange(H, device=x.device)[:, None, None] // (H // x.shape[2])
    return x[b, places, h]


def _scores(q: Tensor, k: Tensor, v: Tensor, pairs: _Pairs, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, -inf where hidden and NaN where a seen pair's query or key is lost; values with 0 for NaN; which have one."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows, keys, values = _taken(q, pairs.i).to(wide), _taken(k, pairs.j).to(wide), _taken(v, pairs.j).to(wide)
    lost = ~rows.isfinite().all(-1)[..., :, None] | ~keys.isfinite().all(-1)[..., None, :]
    rows, keys = (torch.where(y.isfinite(), y, 0.0) for y in (rows, keys))
    x = torch.einsum("rbhgid,rbhgjd->rbhgij", rows, keys) * scale
    x = x.masked_fill(lost, math.nan).masked_fill(~pairs.seen, -math.inf)
    return x, torch.where(values.isfinite(), values, 0.0), ~values.isfinite().all(-1)


def _add_at(x: Tensor, pairs: _Pairs, sizes: tuple[int, int, int], keys: bool = False) -> Tensor:
    """Sums x (R, B, H, g, w, D) at the places of queries or of keys: (B, T, H, D), in one order."""
    B, T, H = sizes
    places = pairs.j if keys else pairs.i
    b = torch.arange(B, device=x.device)[:, None, None, None]
    h = torch.arange(H, device=x.device)[:, None, None]
    rows = (b * T + places) * H + h
    if not keys:
        x = torch.where(pairs.there[..., None], x, 0.0)
    total = x.new_zeros(B * T * H, x.shape[-1])
    if total.numel():
        total = total.index_add(0, rows.flatten(), x.flatten(0, -2))
    return total.view(B, T, H, x.shape[-1])


def _place(x: Tensor, pairs: _Pairs, sizes: tuple[int, int, int], fill: float) -> Tensor:
    """x (R, B, H, g, w, D) by place, (R, B, T, H, D)."""
    B, T, H = sizes
    out = x.new_full((x.shape[0], B, H, T + 1, x.shape[-1]), fill)
    index = torch.where(pairs.there, pairs.i, T).flatten(3)[..., None].expand(-1, -1, -1, -1, x.shape[-1])
    return out.scatter(3, index, x.flatten(3, 4))[:, :, :, :T].transpose(2, 3)


def _flat(x: Tensor, length: int) -> Tensor:
    """x (1, B, H, g, w, ...) by position, (B, H, N, ...)."""
    return x[0].flatten(2, 3)[:, :, :length]


def _padded(x: Tensor, pairs: _Pairs) -> Tensor:
    """x (B, H, N, D) with zeros to whole groups, (1, B, H, g w, D)."""
    need = pairs.i.shape[3] * pairs.i.shape[4] - x.shape[2]
    return torch.nn.functional.pad(x, (0, 0, 0, need))[None]


def _any(x: Tensor, dim: int) -> Tensor:
    return x.any(dim) if x.shape[dim] else x.new_zeros(*x.shape[:-1])
