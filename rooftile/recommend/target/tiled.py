"""Target attention over whole histories in plain operations, tile by tile; the backward computes each tile again."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rooftile.recommend.target.problem import Batch, Gradients, Problem
from rooftile.recommend.target.tiles import Tile, add, put, take, tiles
from rooftile.recommend.target.weights import again, pointwise, slope, softmax


def forward(batch: Batch, problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns o (total_q, H, Dv) in the dtype of q, and lse (total_q, H), which is empty without softmax."""
    q, values = batch.q, batch.values
    o = q.new_zeros(*q.shape[:2], values.shape[2])
    has_lse = problem.weights == "softmax"
    lse = q.new_full(batch.lse_shape if has_lse else (0, 0), -math.inf, dtype=batch.wide)
    for tile in _tiles(batch, problem):
        x, seen = scores(batch, tile, problem.scale)
        if has_lse:
            w, found = softmax(x, seen)
            put(lse, tile.rows, found)
        else:
            w = pointwise(x, seen, problem.weights)
        y = _products(w, take(values, tile.keys, batch.wide))
        put(o, tile.rows, y * _factor(tile, problem, x.dtype))
    return o, lse


def backward(do: Tensor, o: Tensor, lse: Tensor, batch: Batch, problem: Problem) -> Gradients:
    """Returns the gradients for a gradient do (total_q, H, Dv) of o."""
    wide, bias = batch.wide, batch.bias
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in batch[:3])
    db = None if bias is None else torch.zeros(bias.shape, dtype=wide, device=bias.device)
    for tile in _tiles(batch, problem):
        x, seen = scores(batch, tile, problem.scale)
        q, do_tile, o_tile = (take(y, tile.rows, wide) for y in (batch.q, do, o))
        keys, values = (take(y, tile.keys, wide) for y in (batch.keys, batch.values))
        delta = (do_tile * o_tile).sum(-1, keepdim=True)
        do_tile = do_tile * _factor(tile, problem, x.dtype)
        dw = _products(do_tile, values.mT)
        if problem.weights == "softmax":
            w = again(x, seen, take(lse[..., None], tile.rows, wide)[..., 0])
            ds = w * (dw - delta)
        else:
            w = pointwise(x, seen, problem.weights)
            ds = dw * slope(x, seen, problem.weights)
        ds = torch.where(seen, ds, 0.0)
        put(dq, tile.rows, problem.scale * _products(ds, keys))
        add(dk, tile.keys, problem.scale * _transposed(ds, q, keys.shape[1]))
        add(dv, tile.keys, _transposed(w, do_tile, values.shape[1]))
        if db is not None:
            found = ds.sum(2)[..., None]  # (G, H, S, 1)
            add(db[..., None], tile.keys, found if db.shape[1] > 1 else found.sum(1, keepdim=True))
    return Gradients(dq.to(batch.q.dtype), dk.to(batch.keys.dtype), dv.to(batch.values.dtype), db)


def scores(batch: Batch, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
    """The scores of a tile, (G, H, R, S), and which of its events are no padding, (G, 1, 1, S)."""
    q = take(batch.q, tile.rows, batch.wide)
    keys = take(batch.keys, tile.keys, batch.wide)
    x = scale * _products(q, keys.mT)
    if batch.bias is not None:
        x = x + take(batch.bias[..., None], tile.keys, batch.wide).mT
    return x, tile.keys.there[:, None, None]


def _tiles(batch: Batch, problem: Problem) -> Iterator[Tile]:
    dim = batch.keys.shape[1] * (batch.keys.shape[2] + batch.values.shape[2])
    return tiles(batch.cu_q, batch.cu, batch.q.shape[1], dim, problem.deterministic)


def _factor(tile: Tile, problem: Problem, wide: torch.dtype) -> Tensor | float:
    """Returns the factor of a sum: 1, or 1 / n (G, 1, 1, 1)."""
    return tile.keys.there.sum(-1).to(wide).reciprocal()[:, None, None, None] if problem.mean else 1.0


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Products of a (G, H, R, K) and b (G, Hk, K, N): (G, H, R, N). A head of b serves H / Hk of a."""
    G, H, R, K = a.shape
    return (a.reshape(G, b.shape[1], -1, K) @ b).view(G, H, R, -1)


def _transposed(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Products of a^T and b, (G, H, R, S) and (G, H, R, D), summed over the heads that share one: (G, heads, S, D)."""
    G = a.shape[0]
    return a.reshape(G, heads, -1, a.shape[-1]).mT @ b.reshape(G, heads, -1, b.shape[-1])
