"""Attention on split sequences by passing keys around: a rank has its neighbour's keys while its own travel on, and never all.

Partial results are in fp32 and are merged in fp32; o is rounded once, at the end. In the backward the gradients of keys travel
behind their keys, in fp32, while the next rank computes its part of them, and every rank adds its part, in the order of the ring.

Liu et al., Ring Attention, arXiv:2310.01889.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rooftile.exact.masks import Mask
from rooftile.exact.restrict import Piece, over_keys, restrict
from rooftile.exact.spec import NO_OPTIONS, CallSettings, Options
from rooftile.parallel.lanes import Lanes
from rooftile.parallel.layouts import Held, Range, count
from rooftile.parallel.local import LocalCall, added, local_call
from rooftile.parallel.options import Start, of_part, part_of_bias
from rooftile.runtime.ranks import Ranks


class Problem(NamedTuple):
    """A call of `context_attention` on one rank."""

    ranks: Ranks
    tokens: Held
    cu: tuple[int, ...] | None
    mask: Mask
    settings: CallSettings
    first_head: int = 0  # head 0 as the whole problem counts it

    def parts(self, owner: int) -> tuple[Part, ...]:
        """Returns what this rank computes of the keys that `owner` holds."""
        return _parts(self.mask, self.tokens, self.ranks.rank, owner, self.cu)

    def held(self, rank: int) -> int:
        """Returns the number of tokens that a rank holds."""
        return count(self.tokens[rank])


class Part(NamedTuple):
    """Queries [rows) of this rank's tokens over keys [keys) of the owner's, under a mask that counts positions in this part."""

    mask: Mask
    rows: Range
    keys: Range
    start: Start

    @property
    def columns(self) -> Range:
        """The keys, counted within their sequence: columns of a bias."""
        return self.start.key, self.start.key + self.keys[1] - self.keys[0]


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns o and lse of this rank's queries: (B, T / P, H, Dv) and (B, H, T / P), or packed."""
    packed = q.ndim == 3
    bias = options.bias
    if packed:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        bias = None if bias is None else bias.unsqueeze(0)
    o, lse = _Ring.apply(problem, q, k, v, bias, options.alibi, options.sinks, options.seed)
    return (o.squeeze(0), lse.squeeze(0)) if packed else (o, lse)


@lru_cache(maxsize=1024)
def _parts(mask: Mask, held: Held, rank: int, owner: int, cu: tuple[int, ...] | None) -> tuple[Part, ...]:
    """Cuts the mask to the ranges of a rank's queries and of an owner's keys."""
    tokens, found = sum(map(count, held)), []
    rows = 0
    for t_start, t_stop in held[rank]:
        for sequence, first, low, high, piece in _cells(mask, t_start, t_stop, tokens, cu):
            keys = 0
            for s_start, s_stop in held[owner]:
                part = over_keys(piece, max(s_start, low), min(s_stop, high)) if max(s_start, low) < min(s_stop, high) else None
                if part is not None:
                    at = rows + part.t_start - t_start, rows + part.t_stop - t_start
                    start = Start(sequence, part.t_start - first, part.s_start - first)
                    found.append(Part(part.mask, at, (keys + part.s_start - s_start, keys + part.s_stop - s_start), start))
                keys += s_stop - s_start
        rows += t_stop - t_start
    return tuple(found)


def _cells(mask: Mask, t_start: int, t_stop: int, tokens: int, cu: tuple[int, ...] | None) -> Any:
    """Yields pieces without chunks in the coordinates of all tokens.

    Each comes with its sequence's number and first token, and with the range of keys that it may show.
    """
    bounds = [0, tokens] if cu is None else list(cu)
    for sequence, (low, high) in enumerate(pairwise(bounds)):
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
                yield sequence, low, low + first, min(low + last, high), moved


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, problem: Problem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alibi: Tensor | None,
        sinks: Tensor | None, seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        # the sink is no part's: it joins the merged rows
        options = Options(bias, alibi, None, seed)
        merged = _Merged(q, v.shape[-1])
        lanes = Lanes(q.device)
        for owner, (keys, values) in _around(problem, k, v):
            lanes.fork()
            results = []
            for n, part in enumerate(problem.parts(owner)):
                tensors = _rows(q, part.rows), _rows(keys, part.keys), _rows(values, part.keys)
                with lanes.lane(n):
                    results.append((part.rows, *_prepared(problem, part, tensors, options, None).forward(*tensors)))
            lanes.join()
            for result in results:
                merged.add(*result)
        o, lse = merged.o, merged.lse
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            o *= _by_rows(torch.exp(lse - total))
            lse = total
        rounded = o.to(q.dtype)
        # first a tensor of a shape that no other attention saves (see `gathered`)
        ctx.save_for_backward(q.new_empty((0, 1)), q, k, v, rounded, lse, *options[:2], sinks, seed)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        return rounded, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        _, q, k, v, o, lse, bias, alibi, sinks, seed = ctx.saved_tensors
        problem: Problem = ctx.problem
        options, wants_bias = Options(bias, alibi, None, seed), ctx.needs_input_grad[4]
        dbias = torch.zeros(bias.shape, dtype=lse.dtype, device=bias.device) if wants_bias else None
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        do = torch.zeros_like(o) if do is None else do
        grads: list[Tensor] = []
        lanes = Lanes(q.device)
        for owner, (keys, values) in _around(problem, k, v):
            # the gradients of these keys come in while this rank computes its part of them
            coming = None if owner == problem.ranks.rank else _Passed(problem, grads, owner)
            lanes.fork()
            results = []
            for n, part in enumerate(problem.parts(owner)):
                rows, held = part.rows, part.keys
                tensors = _rows(q, rows), _rows(keys, held), _rows(values, held)
                with lanes.lane(n):
                    found, extra = _prepared(problem, part, tensors, options, wants_bias).backward(
                        _rows(do, rows), None if dlse is None else dlse[..., slice(*rows)], *tensors, _rows(o, rows),
                        lse[..., slice(*rows)],
                    )  # fmt: skip
                results.append((part, found, extra))
            lanes.join()
            sums: list[Tensor | None] = [None, None]
            for part, found, extra in results:
                _rows(dq, part.rows).add_(found[0])
                if dbias is not None:
                    part_of_bias(dbias, part.rows, part.columns).add_(extra["bias"])
                sums = [added(total, grad, *part.keys, keys.shape[1]) for total, grad in zip(sums, found[1:], strict=True)]
            own = [torch.zeros_like(x, dtype=lse.dtype) if y is None else y for x, y in zip((keys, values), sums, strict=True)]
            grads = own if coming is None else [x.add_(y) for x, y in zip(coming.wait(), own, strict=True)]
        if problem.ranks.count > 1:
            # home again
            grads = _Passed(problem, grads, problem.ranks.rank).wait()
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[6]:
            D = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1).transpose(-1, -2)
            D = D if dlse is None else D - dlse
            dsinks = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * D).sum((0, 2)).to(sinks.dtype)
        dbias = None if dbias is None else dbias.to(bias.dtype)
        return None, dq.to(q.dtype), grads[0].to(k.dtype), grads[1].to(v.dtype), dbias, None, dsinks, None


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


class _Passed:
    """Gradients on their way to the next rank; `wait` returns those that come from the one before, which are the owner's."""

    def __init__(self, problem: Problem, grads: list[Tensor], owner: int) -> None:
        ranks = problem.ranks
        self._sent = [x.contiguous() for x in grads]
        self._coming = [x.new_empty((x.shape[0], problem.held(owner), *x.shape[2:])) for x in grads]
        self._works = _start(ranks.group, ranks.rank, ranks.count, self._sent, self._coming)

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._coming


def _start(group: dist.ProcessGroup, rank: int, ranks: int, outgoing: list[Tensor], coming: list[Tensor]) -> list[Any]:
    to, from_ = (dist.get_global_rank(group, peer % ranks) for peer in (rank + 1, rank - 1))
    sends = [dist.P2POp(dist.isend, x, to, group) for x in outgoing if x.numel()]
    receives = [dist.P2POp(dist.irecv, x, from_, group) for x in coming if x.numel()]
    return list(dist.batch_isend_irecv(sends + receives)) if sends or receives else []


def _prepared(
    problem: Problem, part: Part, tensors: tuple[Tensor, Tensor, Tensor], options: Options, bias_grad: bool | None
) -> LocalCall:
    """A part's call; for the forward, `bias_grad` is None."""
    back = bias_grad is not None
    own = NO_OPTIONS
    if any(x is not None for x in options):
        own = of_part(
            options, (part.start,), part.rows, part.columns, slice(0, tensors[0].shape[-2]), problem.first_head, tensors[0]
        )
    return local_call(*tensors, part.mask, own, problem.settings, (back, back, back, bool(bias_grad), False))


class _Merged:
    """The sum of attention to parts of the keys: o (B, T, H, Dv) and lse (B, H, T) in fp32, changed in place."""

    def __init__(self, q: Tensor, Dv: int) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self.o = q.new_zeros((*q.shape[:-1], Dv), dtype=wide)
        self.lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=wide)
        self._seen: list[Range] = []

    def add(self, rows: Range, part: Tensor, part_lse: Tensor) -> None:
        """Adds attention of some rows to keys that they have not met yet."""
        o, lse = _rows(self.o, rows), self.lse[..., slice(*rows)]
        if not any(max(a, rows[0]) < min(b, rows[1]) for a, b in self._seen):
            o.copy_(part)
            lse.copy_(part_lse)
        else:
            # both weights add up to 1; a row that has seen nothing keeps its zero
            weight = torch.sigmoid(part_lse - lse).nan_to_num_(0.0)
            o.lerp_(part, _by_rows(weight))
            lse.copy_(torch.logaddexp(lse, part_lse))
        self._seen.append(rows)


def _by_rows(x: Tensor) -> Tensor:
    """(B, H, t) as factors of (B, t, H, Dv)."""
    return x.transpose(-1, -2).unsqueeze(-1)


def _rows(x: Tensor, part: Range) -> Tensor:
    return x[:, slice(*part)]
