"""Attention on split sequences by gathering keys: every rank fetches the keys that its queries see, and computes its own rows whole.

No partial result is merged, so nothing is rounded that one device would not round. The backward fetches the keys again rather than
keeping them, and sums the gradients of keys and values over the ranks in fp32, in the order of the ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rooftile.exact import dispatch
from rooftile.exact.normalise import completed
from rooftile.exact.ops.attention import attention, attention_backward, listed
from rooftile.exact.spec import Call, CallSettings, Options, decode, differentiable, option_names
from rooftile.parallel.pieces import LocalPiece, Share


class Problem(NamedTuple):
    """A call of `context_attention` on one rank."""

    share: Share
    group: dist.ProcessGroup
    settings: CallSettings
    backend: str | None


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns o and lse of this rank's queries."""
    return _Gathered.apply(problem, q, k, v, options.bias, options.alibi, options.sinks)


class _Prepared(NamedTuple):
    """A piece's call: its options, the code of its spec, and the backend that runs it."""

    local: LocalPiece
    options: list[Tensor]
    code: str
    backend: str


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem: Problem, q, k, v, bias, alibi, sinks):
        keys, values = _fetched(problem, k, v)
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(_rows_shape(q), dtype=torch.promote_types(q.dtype, torch.float32))
        calls = []
        for local in problem.share.pieces:
            given = _prepared(problem, local, q, keys, values, Options(bias, alibi, sinks), ctx.needs_input_grad)
            calls.append(given)
            part = attention(
                _tokens(q, local.rows), _tokens(keys, local.keys), _tokens(values, local.keys), given.options, given.code,
                given.backend,
            )  # fmt: skip
            _tokens(o, local.rows).copy_(part[0])
            lse[..., slice(*local.rows)] = part[1]
        ctx.save_for_backward(q, k, v, o, lse, bias, sinks, *(x for call in calls for x in call.options))
        ctx.problem, ctx.calls = problem, [call._replace(options=[None] * len(call.options)) for call in calls]
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, o, lse, bias, sinks, *rest = ctx.saved_tensors
        problem = ctx.problem
        keys, values = _fetched(problem, k, v)
        wide = lse.dtype
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (keys, values))
        dbias = None if bias is None else torch.zeros(bias.shape, dtype=wide, device=bias.device)
        dsinks = None if sinks is None else torch.zeros(sinks.shape, dtype=wide, device=sinks.device)
        for call in ctx.calls:
            rows, held = call.local.rows, call.local.keys
            options, rest = rest[: len(call.options)], rest[len(call.options) :]
            found = attention_backward(
                None if do is None else _tokens(do, rows).contiguous(),
                None if dlse is None else dlse[..., slice(*rows)].contiguous(),
                _tokens(q, rows), _tokens(keys, held), _tokens(values, held),
                _tokens(o, rows).contiguous(), lse[..., slice(*rows)].contiguous(), options, call.code, call.backend,
            )  # fmt: skip
            _tokens(dq, rows).copy_(found[0])
            _tokens(dk, held).add_(found[1])
            _tokens(dv, held).add_(found[2])
            extra = dict(zip(differentiable(decode(call.code)), found[3:], strict=True))
            if "bias" in extra:
                _bias_part(dbias, call.local).add_(extra["bias"])
            if "sinks" in extra:
                dsinks += extra["sinks"]
        exchange, group = problem.share.exchange, problem.group
        dk, dv = exchange.give_back(dk, group).to(k.dtype), exchange.give_back(dv, group).to(v.dtype)
        return (
            None, dq, dk, dv,
            dbias.to(bias.dtype) if ctx.needs_input_grad[4] else None, None,
            dsinks.to(sinks.dtype) if ctx.needs_input_grad[6] else None,
        )  # fmt: skip


def _fetched(problem: Problem, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    exchange, group = problem.share.exchange, problem.group
    coming = exchange.fetch(k, group), exchange.fetch(v, group)
    return coming[0].wait(), coming[1].wait()


def _prepared(
    problem: Problem, local: LocalPiece, q: Tensor, keys: Tensor, values: Tensor, options: Options, needs: Any
) -> _Prepared:  # fmt: skip
    """Checks the piece's call and chooses its backend, as `rooftile.attention` does."""
    piece = local.piece
    if options.bias is not None:
        options = options._replace(bias=_bias_part(options.bias, local))
    if piece.cu_q is not None:
        cu = (torch.tensor(cu, dtype=torch.int32) for cu in (piece.cu_q, piece.cu_k))
        options = options._replace(**dict(zip(("cu_q", "cu_k"), cu, strict=True)))
    tensors = (_tokens(q, local.rows), _tokens(keys, local.keys), _tokens(values, local.keys))
    # the code says whether a backward must exist, as it would outside of this function
    with torch.enable_grad():
        tensors = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs[1:4], strict=True)]
        if options.bias is not None and needs[4]:
            options = options._replace(bias=options.bias.detach().requires_grad_())
        if options.sinks is not None and needs[6]:
            options = options._replace(sinks=options.sinks.detach().requires_grad_())
        call, code = completed(Call(*tensors, piece.mask, options, problem.settings, piece.cu_q is not None))
    chosen = dispatch.choose(code, problem.backend)
    return _Prepared(local, [x.detach() for x in listed(call.options)], code, chosen)


def _rows_shape(q: Tensor) -> tuple[int, ...]:
    return (*q.shape[:-3], q.shape[-2], q.shape[-3])


def _tokens(x: Tensor, part: tuple[int, int]) -> Tensor:
    return x[..., slice(*part), :, :]


def _bias_part(bias: Tensor, local: LocalPiece) -> Tensor:
    """The rows and columns of a bias (..., rows of this rank or 1, all keys or 1) that a piece needs."""
    if bias.shape[-2] > 1:
        bias = bias[..., slice(*local.rows), :]
    return bias[..., local.piece.s_start : local.piece.s_stop] if bias.shape[-1] > 1 else bias
