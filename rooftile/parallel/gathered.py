"""Attention on split sequences by gathering keys: every rank fetches the keys that its queries see, and computes its rows whole.

No partial result is merged, so nothing is rounded that one device would not round. The backward fetches the keys again rather
than keeping them, and sums the gradients of keys and values over the ranks in fp32, in the order of the ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rooftile.exact import dispatch
from rooftile.exact.normalise import completed
from rooftile.exact.ops.attention import attention, attention_backward, listed
from rooftile.exact.spec import Call, CallSettings, Options, decode, differentiable
from rooftile.parallel.layouts import Range
from rooftile.parallel.pieces import LocalPiece, Share


class Problem(NamedTuple):
    """A call of `context_attention` on one rank."""

    share: Share
    group: dist.ProcessGroup
    settings: CallSettings
    backend: str | None

    def fetched(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values that this rank's queries see."""
        coming = [self.share.exchange.fetch(x, self.group) for x in (k, v)]
        return coming[0].wait(), coming[1].wait()

    def given_back(self, grad: Tensor, like: Tensor) -> Tensor:
        """Returns the gradient of this rank's keys or values from the ranks' gradients of what they fetched."""
        return self.share.exchange.give_back(grad, self.group).to(like.dtype)


class _PieceCall(NamedTuple):
    """A piece's call: the code of its spec, the backend that runs it, and the number of its options."""

    local: LocalPiece
    code: str
    backend: str
    options: int


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns o and lse of this rank's queries."""
    found: tuple[Tensor, Tensor] = _Gathered.apply(problem, q, k, v, options.bias, options.alibi, options.sinks)
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
    ) -> tuple[Tensor, Tensor]:
        keys, values = problem.fetched(k, v)
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.promote_types(q.dtype, torch.float32))
        calls: list[_PieceCall] = []
        saved: list[Tensor] = []
        for local in problem.share.pieces:
            tensors = _tokens(q, local.rows), _tokens(keys, local.keys), _tokens(values, local.keys)
            call, given = _prepared(problem, local, tensors, Options(bias, alibi, sinks), ctx.needs_input_grad)
            part = attention(*tensors, given, call.code, call.backend)
            _tokens(o, local.rows).copy_(part[0])
            lse[..., slice(*local.rows)] = part[1]
            calls.append(call)
            saved += given
        # first a tensor of a shape that no other attention saves: a checkpoint whose forward ran again outside of the context has
        # saved something else, and torch.utils.checkpoint says so
        ctx.save_for_backward(q.new_empty((0, len(calls) + 1)), q, k, v, o, lse, bias, sinks, *saved)
        ctx.problem, ctx.calls = problem, calls
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        _, q, k, v, o, lse, bias, sinks, *saved = ctx.saved_tensors
        problem: Problem = ctx.problem
        keys, values = problem.fetched(k, v)
        dq = torch.zeros_like(q)
        dk, dv, dbias, dsinks = (
            None if x is None else torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (keys, values, bias, sinks)
        )
        for call in ctx.calls:
            rows, held = call.local.rows, call.local.keys
            options, saved = saved[: call.options], saved[call.options :]
            found = attention_backward(
                None if do is None else _tokens(do, rows).contiguous(),
                None if dlse is None else dlse[..., slice(*rows)].contiguous(),
                _tokens(q, rows), _tokens(keys, held), _tokens(values, held),
                _tokens(o, rows).contiguous(), lse[..., slice(*rows)].contiguous(), options, call.code, call.backend,
            )  # fmt: skip
            _tokens(dq, rows).copy_(found[0])
            for total, part, place in ((dk, found[1], held), (dv, found[2], held)):
                assert total is not None
                _tokens(total, place).add_(part)
            extra = dict(zip(differentiable(decode(call.code)), found[3:], strict=True))
            if dbias is not None and "bias" in extra:
                _bias_part(dbias, call.local).add_(extra["bias"])
            if dsinks is not None and "sinks" in extra:
                dsinks += extra["sinks"]
        assert dk is not None
        assert dv is not None
        wanted = ctx.needs_input_grad
        return (
            None, dq, problem.given_back(dk, k), problem.given_back(dv, v),
            dbias.to(bias.dtype) if dbias is not None and wanted[4] else None, None,
            dsinks.to(sinks.dtype) if dsinks is not None and wanted[6] else None,
        )  # fmt: skip


def _prepared(
    problem: Problem, local: LocalPiece, tensors: tuple[Tensor, Tensor, Tensor], options: Options, wanted: tuple[bool, ...]
) -> tuple[_PieceCall, list[Tensor]]:
    """Checks a piece's call and chooses its backend, as `rooftile.attention` does; returns it and its options."""
    piece = local.piece
    # the code says whether a backward must exist, as it would outside of this function
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_(need) for x, need in zip(tensors, wanted[1:4], strict=True))
        bias, sinks = options.bias, options.sinks
        if bias is not None:
            bias = _bias_part(bias, local).detach().requires_grad_(wanted[4])
        if sinks is not None:
            sinks = sinks.detach().requires_grad_(wanted[6])
        options = options._replace(bias=bias, sinks=sinks)
        if piece.cu_q is not None:
            cu = [torch.tensor(cu, dtype=torch.int32) for cu in (piece.cu_q, piece.cu_k)]
            options = options._replace(cu_q=cu[0], cu_k=cu[1])
        call, code = completed(Call(q, k, v, piece.mask, options, problem.settings, piece.cu_q is not None))
    given = [x.detach() for x in listed(call.options)]
    return _PieceCall(local, code, dispatch.choose(code, problem.backend), len(given)), given


def _tokens(x: Tensor, part: Range) -> Tensor:
    return x[..., slice(*part), :, :]


def _bias_part(bias: Tensor, local: LocalPiece) -> Tensor:
    """The rows and columns of a bias (..., rows of this rank or 1, all keys or 1) that a piece needs."""
    if bias.shape[-2] > 1:
        bias = bias[..., slice(*local.rows), :]
    return bias[..., local.piece.s_start : local.piece.s_stop] if bias.shape[-1] > 1 else bias
