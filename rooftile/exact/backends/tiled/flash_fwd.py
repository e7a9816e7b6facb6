"""FlashAttention-2 forward on the CPU.

For each tile of queries, over the tiles of keys that it sees:

    X  = scale Q K_j^T            softcap, bias, ALiBi and the mask included
    m' = max(m, rowmax X)
    P  = exp(X - m')
    l  = exp(m - m') l + rowsum P
    O  = exp(m - m') O + P~ V_j   P~ is P after dropout

and at the end O / l and lse = m + log l. A sink initialises m and l: a score whose value is zero.

Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftile.exact.backends.tiled.heads import Heads


def run(heads: Heads, o: Tensor, lse: Tensor) -> None:
    """Writes o (heads, G, T, Dv) and lse (heads, G, T)."""
    for t, t_stop in heads.query_tiles():
        acc, L = _rows(heads, t, t_stop)
        o[:, :, t:t_stop] = acc.unflatten(1, (heads.spec.group, -1))
        lse[:, :, t:t_stop] = L.view(*lse.shape[:2], -1)
    if heads.lost is not None:
        _show_lost(heads, o, lse)


def _rows(heads: Heads, t: int, t_stop: int) -> tuple[Tensor, Tensor]:
    """Returns o (heads, G * rows, Dv) and lse (heads, G * rows, 1) for the queries [t, t_stop)."""
    q = heads.rows(heads.q, t, t_stop)  # (heads, G * rows, D)
    acc = q.new_zeros((*q.shape[:2], heads.v.shape[-1]))
    m = q.new_full((*q.shape[:2], 1), -math.inf)
    if heads.sinks is not None:
        m = heads.sinks.repeat_interleave(t_stop - t, dim=1)[..., None]
    l = (m > -math.inf).to(m.dtype)
    for tile in heads.key_tiles(t, t_stop):
        x, _ = heads.scores(q, tile)
        m_new = torch.maximum(m, x.amax(-1, keepdim=True))
        pivot = _finite_pivot(m_new)
        alpha = torch.exp(m - pivot)
        p = x.sub_(pivot).exp_()
        l = l * alpha + p.sum(-1, keepdim=True)
        if heads.spec.dropout:
            p.mul_(heads.kept(tile))
        acc.mul_(alpha).baddbmm_(p, heads.v[:, tile.s : tile.s_stop])
        m = m_new
    empty = l == 0
    return acc.div_(l.masked_fill(empty, 1.0)), (_finite_pivot(m) + l.log()).masked_fill_(empty, -math.inf)


def _finite_pivot(m: Tensor) -> Tensor:
    """Returns m, or 0 for a row without a visible key so far: -inf - -inf is NaN."""
    return m.masked_fill(m == -math.inf, 0.0)


def _show_lost(heads: Heads, o: Tensor, lse: Tensor) -> None:
    """Writes NaN to exactly the outputs that see a non-finite number."""
    lost_q, lost_k, lost_v = heads.lost
    # a row that sees no key does not use its query
    rows = lost_q.any(-1, keepdim=True) & heads.see_a_key() | heads.seen_by_rows(lost_k.any(-1, keepdim=True))
    lse.masked_fill_(rows[..., 0], math.nan)
    o.masked_fill_(rows | heads.seen_by_rows(lost_v), math.nan)
