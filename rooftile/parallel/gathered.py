"""Attention on split sequences by gathering keys: every rank fetches the keys that its queries see, and computes its rows whole.

No partial result is merged, so nothing is rounded that one device would not round. The backward fetches the keys again rather
than keeping them, and sums the gradients of keys and values over the ranks in fp32, in a fixed order.

Long sequences go by groups of heads: all transfers are asked for at once, and the attention of one group hides the next one's.
In the backward, the gradients of a group travel under the next group's attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rooftile.exact.spec import NO_OPTIONS, CallSettings, Options
from rooftile.parallel.exchange import Fetched
from rooftile.parallel.lanes import Lanes
from rooftile.parallel.layouts import Range
from rooftile.parallel.local import LocalCall, added, local_call, some
from rooftile.parallel.options import of_part, part_of_bias
from rooftile.parallel.pieces import LocalPiece, Share

# bytes of keys and values that a rank fetches per group of heads, and the most groups: each is a launch per piece
GROUP_BYTES, MOST_GROUPS = 1 << 25, 4


class Problem(NamedTuple):
    """A call of `context_attention` on one rank."""

    share: Share
    group: dist.ProcessGroup
    settings: CallSettings
    first_head: int = 0  # head 0 as the whole problem counts it

    def head_groups(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> list[HeadGroup]:
        """Returns groups of key heads and their query heads, the same on every rank."""
        Hk, row = k.shape[-2], k.shape[:-3].numel() * (k.shape[-1] + v.shape[-1]) * k.element_size()
        # a bias has gradients, and may have one head for all
        groups = 1 if options.bias is not None else groups_of(self.share.exchange.most_fetched, Hk, row)
        each, per = Hk // groups, q.shape[-2] // Hk
        return [HeadGroup(slice(n * each * per, (n + 1) * each * per), slice(n * each, (n + 1) * each)) for n in range(groups)]

    def fetched(self, k: Tensor, v: Tensor, groups: list[HeadGroup]) -> list[Fetched]:
        """Starts to fetch the keys and values that this rank's queries see, group by group."""
        return [self.share.exchange.fetch([_heads(x, each.keys) for x in (k, v)], self.group) for each in groups]


def groups_of(tokens: int, Hk: int, row_bytes: int) -> int:
    """Returns the number of groups that key heads are cut into, from the tokens that a rank fetches and their bytes per head."""
    asked = min(tokens * row_bytes * Hk // GROUP_BYTES, MOST_GROUPS)
    return max(n for n in range(1, max(asked, 1) + 1) if Hk % n == 0)


class HeadGroup(NamedTuple):
    """Query heads, and the key heads that they read."""

    queries: slice
    keys: slice


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns o and lse of this rank's queries."""
    found: tuple[Tensor, Tensor] = _Gathered.apply(problem, q, k, v, *options[:4])
    return found


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        alibi: Tensor | None,
        sinks: Tensor | None,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        options = Options(bias, alibi, sinks, seed)
        groups = problem.head_groups(q, k, v, options)
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.promote_types(q.dtype, torch.float32))
        calls: list[list[LocalCall]] = []
        lanes, kept = Lanes(q.device), []
        for each, coming in zip(groups, problem.fetched(k, v, groups), strict=True):
            keys, values = coming.wait()
            # until the lanes join: the current stream may use their memory again as soon as they are dropped
            kept.append((keys, values))
            lanes.fork()
            calls.append([])
            for n, local in enumerate(problem.share.pieces):
                tensors = _of_piece(q, local.rows, each.queries), _tokens(keys, local.keys), _tokens(values, local.keys)
                call = _prepared(problem, local, tensors, options, each, ctx.needs_input_grad)
                with lanes.lane(n):
                    part = call.forward(*tensors)
                    _of_piece(o, local.rows, each.queries).copy_(part[0])
                    _rows_of_lse(lse, local.rows, each.queries).copy_(part[1])
                calls[-1].append(call)
        lanes.join()
        del kept
        # first a tensor of a shape that no other attention saves: a checkpoint whose forward ran again outside of the context has
        # saved something else, and torch.utils.checkpoint says so
        given = [x for of_group in calls for call in of_group for x in call.options]
        ctx.save_for_backward(q.new_empty((0, len(problem.share.pieces) + 1)), q, k, v, o, lse, bias, sinks, *given)
        ctx.problem, ctx.groups = problem, groups
        ctx.calls = [[(call._replace(options=[]), len(call.options)) for call in of_group] for of_group in calls]
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        _, q, k, v, o, lse, bias, sinks, *saved = ctx.saved_tensors
        problem: Problem = ctx.problem
        # every row is of one piece
        dq = torch.empty_like(q)
        dbias, dsinks = (None if x is None else torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (bias, sinks))
        travelling = []
        lanes = Lanes(q.device)
        for each, calls, coming in zip(ctx.groups, ctx.calls, problem.fetched(k, v, ctx.groups), strict=True):
            keys, values = coming.wait()
            lanes.fork()
            found: list[tuple[LocalPiece, list[Tensor], dict[str, Tensor]]] = []
            for n, (local, call) in enumerate(_with_options(problem, calls, saved)):
                rows, held = local.rows, local.keys
                with lanes.lane(n):
                    part, extra = call.backward(
                        some(do, (..., slice(*rows), each.queries, slice(None))), some(dlse, (..., each.queries, slice(*rows))),
                        _of_piece(q, rows, each.queries), _tokens(keys, held), _tokens(values, held),
                        _of_piece(o, rows, each.queries), _rows_of_lse(lse, rows, each.queries),
                    )  # fmt: skip
                    _of_piece(dq, rows, each.queries).copy_(part[0])
                found.append((local, part[1:], extra))
            lanes.join()
            sums: list[Tensor | None] = [None, None]
            for local, of_keys, extra in found:
                sums = [added(total, grad, *local.keys, keys.shape[-3]) for total, grad in zip(sums, of_keys, strict=True)]
                if dbias is not None and "bias" in extra:
                    part_of_bias(dbias, local.rows, local.columns).add_(extra["bias"])
                if dsinks is not None and "sinks" in extra:
                    dsinks[each.queries] += extra["sinks"]
            grads = [torch.zeros_like(x, dtype=lse.dtype) if y is None else y for x, y in zip((keys, values), sums, strict=True)]
            travelling.append(problem.share.exchange.give_back(grads, problem.group))
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for each, coming_back in zip(ctx.groups, travelling, strict=True):
            for whole, own in zip((dk, dv), coming_back.wait(), strict=True):
                _heads(whole, each.keys).copy_(own)
        wanted = ctx.needs_input_grad
        return (
            None, dq, dk, dv,
            dbias.to(bias.dtype) if dbias is not None and wanted[4] else None, None,
            dsinks.to(sinks.dtype) if dsinks is not None and wanted[6] else None, None,
        )  # fmt: skip


def _prepared(
    problem: Problem, local: LocalPiece, tensors: tuple[Tensor, Tensor, Tensor], options: Options, group: HeadGroup,
    wanted: tuple[bool, ...],
) -> LocalCall:  # fmt: skip
    """A piece's call for a group of heads."""
    piece = local.piece
    own = NO_OPTIONS
    if any(x is not None for x in options):
        own = of_part(options, local.starts, local.rows, local.columns, group.queries, problem.first_head, tensors[0])
    cu = None if piece.cu_q is None or piece.cu_k is None else (piece.cu_q, piece.cu_k)
    needs = (wanted[1], wanted[2], wanted[3], wanted[4], wanted[6])
    return local_call(*tensors, piece.mask, own, problem.settings, needs, cu)


def _with_options(
    problem: Problem, calls: list[tuple[LocalCall, int]], saved: list[Tensor]
) -> Iterator[tuple[LocalPiece, LocalCall]]:  # fmt: skip
    """Yields a group's pieces and calls with their saved options, which are taken from the list."""
    for local, (call, count) in zip(problem.share.pieces, calls, strict=True):
        yield local, call._replace(options=saved[:count])
        del saved[:count]


def _tokens(x: Tensor, part: Range) -> Tensor:
    return x.narrow(-3, part[0], part[1] - part[0])


def _heads(x: Tensor, part: slice) -> Tensor:
    return _part(x, -2, part)


def _of_piece(x: Tensor, rows: Range, heads: slice) -> Tensor:
    return _part(_tokens(x, rows), -2, heads)


def _rows_of_lse(lse: Tensor, rows: Range, heads: slice) -> Tensor:
    return _part(lse.narrow(-1, rows[0], rows[1] - rows[0]), -2, heads)


def _part(x: Tensor, axis: int, part: slice) -> Tensor:
    size = part.stop - part.start
    return x if size == x.shape[axis] else x.narrow(axis, part.start, size)
