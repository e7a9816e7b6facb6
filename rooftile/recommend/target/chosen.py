"""Target attention over chosen events in plain operations: a piece of the candidates at a time, with copies of their events."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.recommend.target.problem import Batch, Gradients, Problem, first_events
from rooftile.recommend.target.tiles import FIXED_ROWS, MOST_COPIED
from rooftile.recommend.target.weights import again, pointwise, slope, softmax


class Piece(NamedTuple):
    """Some candidates and their events."""

    rows: slice
    q: Tensor  # (R, H, 1, D)
    keys: Tensor  # (R, H, k, D), zeros where there is none
    values: Tensor  # (R, H, k, Dv)
    seen: Tensor  # (R, 1|H, k)
    at: Tensor  # (R, H, k): row of all events
    kv: Tensor  # (H, 1): key head of each head
    h: Tensor  # (H, 1): column of the bias

    @property
    def size(self) -> int:
        """How many candidates are no padding."""
        return self.rows.stop - self.rows.start

    def factor(self, problem: Problem) -> Tensor | float:
        """Returns the factor of a sum: 1, or 1 / k (R, 1|H, 1)."""
        return self.seen.sum(-1, keepdim=True).clamp(min=1).to(self.q.dtype).reciprocal() if problem.mean else 1.0


def forward(batch: Batch, problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns o (total_q, H, Dv) in the dtype of q, and lse (total_q, H), which is empty without softmax."""
    q = batch.q
    o = q.new_zeros(*q.shape[:2], batch.values.shape[2])
    has_lse = problem.weights == "softmax"
    lse = q.new_full(batch.lse_shape if has_lse else (0, 0), -math.inf, dtype=batch.wide)
    for piece in _pieces(batch, problem):
        x = _scores(batch, piece, problem)
        if has_lse:
            w, found = softmax(x, piece.seen)
            lse[piece.rows] = found[: piece.size]
        else:
            w = pointwise(x, piece.seen, problem.weights)
        y = (w[:, :, None] @ piece.values)[:, :, 0] * piece.factor(problem)
        o[piece.rows] = y[: piece.size].to(o.dtype)
    return o, lse


def backward(do: Tensor, o: Tensor, lse: Tensor, batch: Batch, problem: Problem) -> Gradients:
    """Returns the gradients for a gradient do (total_q, H, Dv) of o; events that were not chosen have a gradient of zero."""
    wide, bias = batch.wide, batch.bias
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in batch[:3])
    db = None if bias is None else torch.zeros(bias.shape, dtype=wide, device=bias.device)
    for piece in _pieces(batch, problem):
        x = _scores(batch, piece, problem)
        do_piece, o_piece = (_rows(y, piece.rows, x.shape[0]).to(wide) for y in (do, o))
        delta = (do_piece * o_piece).sum(-1, keepdim=True)
        do_piece = do_piece * piece.factor(problem)
        dw = (piece.values @ do_piece[..., None])[..., 0]  # (R, H, k)
        if problem.weights == "softmax":
            w = again(x, piece.seen, _rows(lse, piece.rows, x.shape[0]))
            ds = w * (dw - delta)
        else:
            w = pointwise(x, piece.seen, problem.weights)
            ds = dw * slope(x, piece.seen, problem.weights)
        ds = torch.where(piece.seen, ds, 0.0)
        dq[piece.rows] = problem.scale * (ds[:, :, None] @ piece.keys)[: piece.size, :, 0]
        _add(dk, piece, piece.kv, problem.scale * ds[..., None] * piece.q)
        _add(dv, piece, piece.kv, w[..., None] * do_piece[:, :, None])
        if db is not None:
            _add(db[..., None], piece, piece.h, ds[..., None])
    return Gradients(dq.to(batch.q.dtype), dk.to(batch.keys.dtype), dv.to(batch.values.dtype), db)


def _pieces(batch: Batch, problem: Problem) -> Iterator[Piece]:
    events, q = batch.events, batch.q
    assert events is not None
    total, H = q.shape[:2]
    h = torch.arange(H, device=q.device)[:, None]
    kv = h // (H // batch.keys.shape[1])
    first = first_events(batch)
    per_row = H * events.shape[2] * (batch.keys.shape[2] + batch.values.shape[2])
    step = FIXED_ROWS if problem.deterministic else max(MOST_COPIED // max(per_row, 1), 1)
    # without an event there is nothing to copy
    for row in range(0, total if batch.keys.shape[0] else 0, step):
        rows = slice(row, min(row + step, total))
        size = step if problem.deterministic else rows.stop - row
        places = _rows(events, rows, size, -1).long()
        seen = places >= 0
        at = torch.where(seen, _rows(first, rows, size)[:, None, None] + places, 0).expand(-1, H, -1)
        keys, values = (torch.where(seen[..., None], x[at, kv].to(batch.wide), 0.0) for x in (batch.keys, batch.values))
        column = h if batch.bias is not None and batch.bias.shape[1] > 1 else 0 * h
        yield Piece(rows, _rows(q, rows, size).to(batch.wide)[:, :, None], keys, values, seen, at, kv, column)


def _rows(x: Tensor, rows: slice, size: int, fill: float = 0.0) -> Tensor:
    """Rows of a tensor, filled up to a size."""
    found = x[rows]
    more = size - found.shape[0]
    return torch.cat([found, found.new_full((more, *found.shape[1:]), fill)]) if more else found


def _scores(batch: Batch, piece: Piece, problem: Problem) -> Tensor:
    x = problem.scale * (piece.q @ piece.keys.mT)[:, :, 0]  # (R, H, k)
    if batch.bias is not None:
        x = x + torch.where(piece.seen, batch.bias[piece.at, piece.h].to(batch.wide), 0.0)
    return x


def _add(whole: Tensor, piece: Piece, head: Tensor, found: Tensor) -> None:
    """Adds what candidates found (R, H, k, D) to their events, in one order."""
    there = piece.seen.expand(found.shape[:3])
    row = (piece.at * whole.shape[1] + head)[there]
    whole.flatten(0, 1).index_add_(0, row, found[there])
