"""FlashAttention-2 backward on the CPU: weights recomputed from lse, one loop over the tiles for all gradients.

    D  = rowsum(dO * O) - dL          dL is the gradient of lse
    P  = exp(X - lse)                 dV_j += P~^T dO
    dP = dO V_j^T                     through dropout
    dX = P * (dP - D)                 the gradient of bias
    dS = dX (1 - tanh^2)              before the softcap
    dQ += dS K_j                      dK_j += dS^T Q
    dsink = -sum exp(sink - lse) D

Rows that see nothing, or whose lse is NaN, get an lse of +inf here, and so weights of 0.

lse is one rounded number. A row whose scores share a large offset has lost the log of its sum in it, and its weights would
add up to n rather than to 1. So wherever lse is far from 0, the sum is computed again, as exp(rest), and
P = exp(X - lse - rest): X - lse is exact there.

Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.exact.backends.tiled.heads import Heads, strip
from rooftile.exact.backends.tiled.tiles import Tile
from rooftile.exact.reference.nonfinite import all_finite, set_aside
from rooftile.exact.spec import Grads

# an lse within this is rounded by no more than the scores that it came from
FAR = 64.0


class Incoming(NamedTuple):
    """Results of the forward and incoming gradients, (heads, G, T, Dv) and (heads, G, T)."""

    do: Tensor | None
    dlse: Tensor | None
    o: Tensor
    lse: Tensor


class RowStrips(NamedTuple):
    """Strips of per-row data for the backward, finite except for the lse of +inf of rows without weights."""

    do: Tensor  # (heads, G, T, Dv)
    D: Tensor  # (heads, G, T, 1)
    lse: Tensor  # (heads, G, T, 1)
    rest: Tensor | None  # (heads, G, T, 1), what lse has lost of the log of the sum; None if no row is far
    lost: tuple[Tensor, Tensor, Tensor] | None  # rows whose P is lost, elements of do, rows whose dX is lost


def run(heads: Heads, incoming: Incoming, grads: Grads) -> None:
    """Writes dq (heads, G, T, D), dk (heads, S, D), dv (heads, S, Dv); adds to dbias and dsinks."""
    rows = _prepare(heads, incoming, grads)
    dk, dv = torch.zeros_like(heads.k), torch.zeros_like(heads.v)
    for t, t_stop in heads.query_tiles():
        q, do, D, lse = (heads.rows(x, t, t_stop) for x in (heads.q, rows.do, rows.D, rows.lse))
        rest = None if rows.rest is None else heads.rows(rows.rest, t, t_stop)
        dq = torch.zeros_like(q)
        for tile in heads.key_tiles(t, t_stop):
            keys = slice(tile.s, tile.s_stop)
            x, capped = heads.scores(q, tile)
            x.sub_(lse)
            if rest is not None:
                x.sub_(rest)
            p, dx = _weights(heads, x.exp_(), torch.bmm(do, heads.v[:, keys].mT), D, tile, rows)
            # a product, then a sum: torch's in-place product on a slice multiplies head by head, at half the speed
            dv[:, keys] += torch.bmm(p.mT, do)
            if grads.dbias is not None:
                heads.add_to_bias(grads.dbias, _shown(heads, dx, tile, rows), tile)
            if capped is not None:
                dx.mul_(capped.square_().neg_().add_(1))
            dq.baddbmm_(dx, heads.k[:, keys])
            dk[:, keys] += torch.bmm(dx.mT, q)
        grads.dq[:, :, t:t_stop] = dq.mul_(heads.spec.scale).unflatten(1, (heads.spec.group, -1))
    # the strip of q is already scaled
    grads.dk.copy_(dk)
    grads.dv.copy_(dv)
    if rows.lost is not None:
        _show_lost(heads, rows, grads)


def _weights(heads: Heads, p: Tensor, dp: Tensor, D: Tensor, tile: Tile, rows: RowStrips) -> tuple[Tensor, Tensor]:
    """Returns a tile's weights after dropout, and the gradient of its scores. Overwrites p and dp."""
    if rows.lost is not None:
        p.nan_to_num_(nan=0.0)
    dropped = p
    if heads.spec.dropout:
        kept = heads.kept(tile)
        dropped = p * kept
        dp.mul_(kept)
    dx = dp.sub_(D).mul_(p)
    if tile.partial:
        # 0 * inf: a hidden value may be so large that dP overflows
        heads.unstacked(dx, tile).masked_fill_(heads.hidden(tile), 0.0)
    return dropped, dx


def _prepare(heads: Heads, incoming: Incoming, grads: Grads) -> RowStrips:
    wide = heads.q.dtype
    lse = strip(incoming.lse[..., None], wide)
    do = lse.new_zeros(incoming.o.shape) if incoming.do is None else strip(incoming.do, wide)
    D = (do * incoming.o).sum(-1, keepdim=True)
    empty = lse == -math.inf
    # D reveals NaN in do and o, also in rows that see nothing: 0 * NaN is NaN
    finite = heads.lost is None and all_finite(D, lse.masked_fill(empty, 0.0))
    if not finite:
        # a row that sees no key has o = 0, whatever do holds
        D.masked_fill_(~heads.see_a_key(), 0.0)
    if incoming.dlse is not None:
        D -= incoming.dlse[..., None]
        finite = finite and all_finite(D)
    D.masked_fill_(empty, 0.0)
    lse.masked_fill_(empty, math.inf)
    rest = None if heads.spec.partial else _rest_of_lse(heads, lse)
    if grads.dsinks is not None:
        x = heads.sinks[..., None, None] - lse
        grads.dsinks.sub_((torch.exp(x if rest is None else x - rest) * D).sum((2, 3)))
    if finite:
        return RowStrips(do, D, lse, rest, None)
    lost_p = ~torch.isfinite(lse) & ~empty
    do, lost_do = set_aside(do)
    D, lost_D = set_aside(D)
    return RowStrips(do, D, lse.masked_fill(lost_p, math.inf), rest, (lost_p, lost_do, lost_p | lost_D))


def _rest_of_lse(heads: Heads, lse: Tensor) -> Tensor | None:
    """Returns log(sum exp(X - lse)) of rows (heads, G, T, 1) that are far, and 0 of the others; None if no row is far."""
    far = lse.abs().gt(FAR) & lse.isfinite()
    if not far.any():
        return None
    rest = torch.zeros_like(lse)
    for t, t_stop in heads.query_tiles():
        if not far[:, :, t:t_stop].any():
            continue
        q, reference = heads.rows(heads.q, t, t_stop), heads.rows(lse, t, t_stop)
        total = torch.zeros_like(reference)
        if heads.sinks is not None:
            total = torch.exp(heads.sinks.repeat_interleave(t_stop - t, dim=1)[..., None] - reference)
        for tile in heads.key_tiles(t, t_stop):
            total += heads.scores(q, tile)[0].sub_(reference).exp_().sum(-1, keepdim=True)
        rest[:, :, t:t_stop] = total.log_().unflatten(1, (heads.spec.group, -1))
    return rest.masked_fill_(~far, 0.0)


def _shown(heads: Heads, dx: Tensor, tile: Tile, rows: RowStrips) -> Tensor:
    """Returns dx with NaN where it is lost: a bias has an element, and so a gradient, per pair."""
    if rows.lost is None:
        return dx
    lost = rows.lost[2][:, :, tile.t : tile.t_stop]  # (heads, G, rows, 1)
    if tile.partial:
        lost = lost & ~heads.hidden(tile)
    return heads.unstacked(dx, tile).masked_fill(lost, math.nan).view(dx.shape)


def _show_lost(heads: Heads, rows: RowStrips, grads: Grads) -> None:
    """Writes NaN to the gradients that a lost row, or a lost element of do, reaches through a visible pair."""
    lost_p, lost_do, lost_x = rows.lost
    grads.dq.masked_fill_(lost_x & heads.see_a_key(), math.nan)
    grads.dk.masked_fill_(heads.seeing_keys(lost_x), math.nan)
    grads.dv.masked_fill_(heads.seeing_keys(lost_p | lost_do), math.nan)
