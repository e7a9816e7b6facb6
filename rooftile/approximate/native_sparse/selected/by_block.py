"""Attention to chosen blocks on a CPU: block by block, the queries that chose one as the rows of a product.

A query is a few kilobytes, and the keys that it chose are hundreds: so queries go to the keys, and no key is copied. The softmax
is an online one, as blocks come one after the other. In the packed layout, as `plain`, whose results these are.

A product with a weight of 0 is not harmless where the other factor is NaN: a block that is not finite is computed row by row,
with 0 in place of what a row does not see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.approximate.native_sparse.selected.plain import is_far


class ChosenBlock(NamedTuple):
    """One block of keys of one head, and the queries that chose it."""

    hk: int
    rows: Tensor  # (c,)
    keys: slice
    sees: Tensor  # (c, 1, block)


def forward(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, block: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns o (total, H, Dv) in the dtype of q, and lse (total, H) in fp32 at least."""
    wide, (total, H, _), Hk = torch.promote_types(q.dtype, torch.float32), q.shape, k.shape[1]
    m = torch.full((Hk, total, H // Hk), -math.inf, dtype=wide)
    l, acc = torch.zeros_like(m), m.new_zeros(*m.shape, v.shape[-1])
    heads, k, v = _by_head(q, Hk), k.to(wide), v.to(wide)
    for hk, rows, keys, sees in _steps(chosen, cu_q, cu_k, block):
        x = (heads[hk, rows].to(wide) @ k[keys, hk].T).mul_(scale).masked_fill_(~sees, -math.inf)
        top = torch.maximum(m[hk, rows], x.amax(-1))
        reference = top.masked_fill(top == -math.inf, 0.0)
        alpha = torch.exp(m[hk, rows] - reference)
        p = x.sub_(reference[..., None]).exp_()
        m[hk, rows], l[hk, rows] = top, l[hk, rows] * alpha + p.sum(-1)
        acc[hk, rows] = acc[hk, rows] * alpha[..., None] + _weighed(p, v[keys, hk], sees)
    o = acc / torch.where(l == 0, 1.0, l)[..., None]
    return _by_row(o).to(q.dtype), (m + l.log()).transpose(0, 1).flatten(1).contiguous()


def backward(
    do: Tensor, lse: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, cu_q: Tensor, cu_k: Tensor,
    scale: float, block: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns dq, dk and dv in the dtypes of q, k and v, from lse and delta (total, H)."""
    wide, Hk = lse.dtype, k.shape[1]
    heads, incoming = _by_head(q, Hk), _by_head(do, Hk)
    top, part = (x.unflatten(1, (Hk, -1)).transpose(0, 1) for x in (lse, delta))
    dq = torch.zeros(heads.shape, dtype=wide)
    dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (k, v))
    keys_of, values_of = k.to(wide), v.to(wide)
    rest = _rest_of_lse(heads, top, keys_of, chosen, cu_q, cu_k, scale, block)
    for hk, rows, keys, sees in _steps(chosen, cu_q, cu_k, block):
        own, given = heads[hk, rows].to(wide), incoming[hk, rows].to(wide)  # (c, group, D)
        x = (own @ keys_of[keys, hk].T).mul_(scale)
        x.sub_(top[hk, rows, :, None])
        if rest is not None:
            x.sub_(rest[hk, rows, :, None])
        p = x.exp_().masked_fill_(~sees, 0.0)
        dp = given @ values_of[keys, hk].T
        ds = (p * (dp - part[hk, rows, :, None]) * scale).masked_fill_(~sees, 0.0)
        dq[hk, rows] += _weighed(ds, keys_of[keys, hk], sees)
        dk[keys, hk] += _summed(ds, own, sees)
        dv[keys, hk] += _summed(p, given, sees)
    return _by_row(dq).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _rest_of_lse(
    heads: Tensor, lse: Tensor, keys_of: Tensor, chosen: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, block: int
) -> Tensor | None:
    """Returns log(sum exp(x - lse)) of rows (Hk, total, group) that are far, and 0 of the others; None if no row is far."""
    far = is_far(lse)
    if not far.any():
        return None
    total = torch.zeros_like(lse)
    for hk, rows, keys, sees in _steps(chosen, cu_q, cu_k, block):
        x = (heads[hk, rows].to(lse.dtype) @ keys_of[keys, hk].T).mul_(scale).sub_(lse[hk, rows, :, None])
        total[hk, rows] += x.exp_().masked_fill_(~sees, 0.0).sum(-1)
    return torch.where(far, total.log(), 0.0)


def _by_row(x: Tensor) -> Tensor:
    """The way back from `_by_head`, contiguous."""
    return x.transpose(0, 1).flatten(1, 2).contiguous()


def _steps(chosen: Tensor, cu_q: Tensor, cu_k: Tensor, block: int) -> Iterator[ChosenBlock]:
    """Yields every block of keys that a query chose, with its queries."""
    total, Hk, _ = chosen.shape
    row = torch.arange(total)
    of = (torch.searchsorted(cu_q, row, right=True) - 1).clamp(min=0)
    first, S = cu_k[of].long(), cu_k.diff()[of].long()
    position = row - cu_q[of] + S - cu_q.diff()[of]
    blocks = chosen.long()
    # a block begins at a key: equal numbers are equal blocks, also across sequences
    begin = blocks * block
    there = (blocks >= 0) & (begin < S[:, None, None]) & (begin <= position[:, None, None])
    numbers = torch.where(there, (begin + first[:, None, None]) * Hk + torch.arange(Hk)[:, None], -1)
    pairs = torch.stack([numbers.flatten(), row[:, None, None].expand(blocks.shape).flatten()])[:, there.flatten()]
    # a block that is listed twice is seen once
    pairs = torch.unique(pairs, dim=1)
    found, counts = torch.unique_consecutive(pairs[0], return_counts=True)
    token, start = torch.arange(block), 0
    for number, count in zip(found.tolist(), counts.tolist(), strict=True):
        rows = pairs[1, start : start + count]
        start += count
        begin_key, hk = divmod(number, Hk)
        one = int(rows[0])
        stop = min(begin_key + block, int(first[one] + S[one]))
        place = begin_key - first[one] + token[: stop - begin_key]
        yield ChosenBlock(hk, rows, slice(begin_key, stop), (place <= position[rows, None])[:, None])


def _by_head(x: Tensor, Hk: int) -> Tensor:
    """Queries (total, H, D) as (Hk, total, group, D)."""
    return x.unflatten(1, (Hk, -1)).transpose(0, 1)


def _weighed(weights: Tensor, values: Tensor, sees: Tensor) -> Tensor:
    """The sums of values (block, D) by weights (c, group, block); what a row does not see is 0 in them."""
    if values.isfinite().all():
        return weights @ values
    return weights @ torch.where(sees.mT, values, 0.0)


def _summed(weights: Tensor, rows: Tensor, sees: Tensor) -> Tensor:
    """The sums over rows (c, group, D) by weights (c, group, block), (block, D)."""
    if rows.isfinite().all():
        return weights.flatten(0, 1).T @ rows.flatten(0, 1)
    terms = torch.einsum("cgj,cgd->cjd", weights, rows)
    return terms.masked_fill(~sees.mT, 0.0).sum(0)
