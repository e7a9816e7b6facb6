"""Attention on split sequences by passing keys around: a rank has its neighbour's keys while its own travel on, and never all.

Partial results are in fp32 and are merged in fp32; o is rounded once, at the end. In the backward the gradients of keys travel
with their keys, in fp32, and every rank adds its part, in the order of the ring.

Liu et al., Ring Attention, arXiv:2310.01889.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rooftile.exact import dispatch
from rooftile.exact.masks import Mask
from rooftile.exact.normalise import completed
from rooftile.exact.ops.attention import attention, attention_backward
from rooftile.exact.restrict import Piece, over_keys, restrict
from rooftile.exact.spec import NO_OPTIONS, Call, CallSettings
from rooftile.parallel.layouts import Range, count, ranges
from rooftile.runtime.ranks import Ranks


class Problem(NamedTuple):
    """A call of `context_attention` on one rank."""

    ranks: Ranks
    layout: str
    tokens: int
    cu: tuple[int, ...] | None
    mask: Mask
    settings: CallSettings
    backend: str | None

    def parts(self, owner: int) -> tuple[Part, ...]:
        """Returns what this rank computes of the keys that `owner` holds."""
        return _parts(self.mask, self.tokens, self.layout, self.ranks.rank, owner, self.ranks.count, self.cu)

    def held(self, rank: int) -> int:
        """Returns the number of tokens that a rank holds."""
        return count(ranges(self.tokens, self.ranks.count, self.layout)[rank])


class Part(NamedTuple):
    """Queries [rows) of this rank's tokens over keys [keys) of the owner's, under a mask that counts positions in this part."""

    mask: Mask
    rows: Range
    keys: Range


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns o and lse of this rank's queries: (B, T / P, H, Dv) and (B, H, T / P), or packed."""
    packed = q.ndim == 3
    if packed:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    o, lse = _Ring.apply(problem, q, k, v, sinks)
    return (o.squeeze(0), lse.squeeze(0)) if packed else (o, lse)


@lru_cache(maxsize=1024)
def _parts(
    mask: Mask, tokens: int, layout: str, rank: int, owner: int, ranks: int, cu: tuple[int, ...] | None
) -> tuple[Part, ...]:
    """Cuts the mask to the ranges of a rank's queries and of an owner's keys."""
    held, found = ranges(tokens, ranks, layout), []
    rows = 0
    for t_start, t_stop in held[rank]:
        for low, high, piece in _cells(mask, t_start, t_stop, tokens, cu):
            keys = 0
            for s_start, s_stop in held[owner]:
                part = over_keys(piece, max(s_start, low), min(s_stop, high)) if max(s_start, low) < min(s_stop, high) else None
                if part is not None:
                    at = rows + part.t_start - t_start, rows + part.t_stop - t_start
                    found.append(Part(part.mask, at, (keys + part.s_start - s_start, keys + part.s_stop - s_start)))
                keys += s_stop - s_start
        rows += t_stop - t_start
    return tuple(found)


def _cells(mask: Mask, t_start: int, t_stop: int, tokens: int, cu: tuple[int, ...] | None) -> Any:
    """Yields pieces without chunks in the coordinates of the whole sequence, each with the range of keys that it may show."""
    bounds = [0, tokens] if cu is None else list(cu)
    for low, high in pairwise(bounds):
        a, b = max(low, t_start), min(high, t_stop)
        if a >= b:
            continue
        cuts = sorted({a - low, b - low, *(c for n in mask.chunks for c in range((a - low) // n * n, b - low, n) if c > a - low)})
        free = Mask(mask.left, mask.right, mask.prefix)
        for t0, t1 in pairwise(cuts):
            first = max((t0 // n * n for n in mask.chunks), default=0)
            last = min((t0 // n * n + n for n in mask.chunks), default=high - low)
            for piece in restrict(free, t0, t1, high - low, high - low):
                moved = Piece(
                    piece.mask, piece.t_start + low, piece.t_stop + low, piece.s_start + low, piece.s_stop + low, piece.ahead
                )  # fmt: skip
                yield low + first, min(low + last, high), moved


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, problem: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wide = torch.promote_types(q.dtype, torch.float32)
        o = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=wide)
        for owner, (keys, values) in _around(problem, k, v):
            for part in problem.parts(owner):
                tensors = _rows(q, part.rows), _rows(keys, part.keys), _rows(values, part.keys)
                code, backend = _prepared(problem, part, tensors, False)
                found = attention(*tensors, [], code, backend)
                _merge(_rows(o, part.rows), lse[..., slice(*part.rows)], *found)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(wide)[:, None])
            o *= _by_rows(torch.exp(lse - total))
            lse = total
        rounded = o.to(q.dtype)
        # first a tensor of a shape that no other attention saves (see `gathered`)
        ctx.save_for_backward(q.new_empty((0, 1)), q, k, v, rounded, lse, sinks)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        return rounded, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        _, q, k, v, o, lse, sinks = ctx.saved_tensors
        problem: Problem = ctx.problem
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        do = torch.zeros_like(o) if do is None else do.contiguous()
        grads = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v)]
        owner = problem.ranks.rank
        for owner, (keys, values) in _around(problem, k, v):
            if owner != problem.ranks.rank:
                grads = _passed(problem, grads, owner)
            for part in problem.parts(owner):
                rows, held = part.rows, part.keys
                tensors = _rows(q, rows), _rows(keys, held), _rows(values, held)
                code, backend = _prepared(problem, part, tensors, True)
                found = attention_backward(
                    _rows(do, rows).contiguous(), None if dlse is None else dlse[..., slice(*rows)].contiguous(), *tensors,
                    _rows(o, rows).contiguous(), lse[..., slice(*rows)].contiguous(), [], code, backend,
                )  # fmt: skip
                for total, grad, place in zip((dq, *grads), found, (rows, held, held), strict=True):
                    _rows(total, place).add_(grad)
        if problem.ranks.count > 1:
            # home again
            grads = _passed(problem, grads, problem.ranks.rank)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[4]:
            D = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1).transpose(-1, -2)
            D = D if dlse is None else D - dlse
            dsinks = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * D).sum((0, 2)).to(sinks.dtype)
        return None, dq.to(q.dtype), grads[0].to(k.dtype), grads[1].to(v.dtype), dsinks


def _around(problem: Problem, k: Tensor, v: Tensor) -> Any:
    """Yields each rank and its keys and values, this one's first; the next ones travel meanwhile."""
    group, rank, ranks = problem.ranks.group, problem.ranks.rank, problem.ranks.count
    here = [k.contiguous(), v.contiguous()]
    for hop in range(ranks):
        coming, works = here, []
        if hop < ranks - 1:
            size = problem.held((rank - hop - 1) % ranks)
            coming = [x.new_empty((x.shape[0], size, *x.shape[2:])) for x in here]
            works = _start(group, rank, ranks, here, coming)
        yield (rank - hop) % ranks, here
        for work in works:
            work.wait()
        here = coming


def _passed(problem: Problem, grads: list[Tensor], owner: int) -> list[Tensor]:
    """Sends gradients to the next rank, and returns those that come from the one before, which are the owner's."""
    coming = [x.new_empty((x.shape[0], problem.held(owner), *x.shape[2:])) for x in grads]
    for work in _start(problem.ranks.group, problem.ranks.rank, problem.ranks.count, grads, coming):
        work.wait()
    return coming


def _start(group: dist.ProcessGroup, rank: int, ranks: int, outgoing: list[Tensor], coming: list[Tensor]) -> list[Any]:
    to, from_ = (dist.get_global_rank(group, peer % ranks) for peer in (rank + 1, rank - 1))
    sends = [dist.P2POp(dist.isend, x, to, group) for x in outgoing if x.numel()]
    receives = [dist.P2POp(dist.irecv, x, from_, group) for x in coming if x.numel()]
    return list(dist.batch_isend_irecv(sends + receives)) if sends or receives else []


def _prepared(problem: Problem, part: Part, tensors: tuple[Tensor, ...], back: bool) -> tuple[str, str]:
    """Checks a part's call and chooses its backend, as `rooftile.attention` does."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_(back) for x in tensors)
        _, code = completed(Call(q, k, v, part.mask, NO_OPTIONS, problem.settings))
    return code, dispatch.choose(code, problem.backend)


def _merge(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds attention to other keys to o (B, t, H, Dv) and lse (B, H, t), in place."""
    total = torch.logaddexp(lse, part_lse)
    # rows that saw nothing so far, and see nothing here
    pivot = total.masked_fill(total == float("-inf"), 0.0)
    o.mul_(_by_rows(torch.exp(lse - pivot))).add_(part * _by_rows(torch.exp(part_lse - pivot)))
    lse.copy_(total)


def _by_rows(x: Tensor) -> Tensor:
    """(B, H, t) as factors of (B, t, H, Dv)."""
    return x.transpose(-1, -2).unsqueeze(-1)


def _rows(x: Tensor, part: Range) -> Tensor:
    return x[:, slice(*part)]
