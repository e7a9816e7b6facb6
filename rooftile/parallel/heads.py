"""Attention on split sequences by exchanging tokens for heads (Ulysses): two all-to-alls, and between them an ordinary call.

Each rank gets every token of its part of the heads, in the order of the whole sequence. So the local call is one device's on
fewer heads, bit for bit where that is deterministic.

Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.exact import api
from rooftile.exact.masks import Mask
from rooftile.exact.places import Place, with_places
from rooftile.exact.spec import CallSettings, Options
from rooftile.parallel.layouts import Held, count
from rooftile.parallel.local import some
from rooftile.runtime.ranks import Ranks

# attention of some heads to all tokens that were exchanged: from q, k, v, their options and the first head to o and lse
Attend = Callable[[Tensor, Tensor, Tensor, Options, int], tuple[Tensor, Tensor]]


class Problem(NamedTuple):
    """The ranks that exchange tokens for heads, and the ranges that each holds of their tokens."""

    ranks: Ranks
    held: Held

    @property
    def sizes(self) -> list[int]:
        """The number of tokens that each rank holds."""
        return [count(parts) for parts in self.held]


def check(q: Tensor, k: Tensor, options: Options, ranks: Ranks, method: str) -> None:
    """Raises InvalidInput if the heads cannot be dealt out to the ranks, or for a bias."""
    P, H, Hk = ranks.count, q.shape[-2], k.shape[-2]
    if H % P or (Hk % P and P % Hk):
        raise InvalidInput(
            f"method {method!r} deals {H} query heads and {Hk} key heads out to {P} ranks; the ranks must divide the query "
            "heads, and divide the key heads or be a multiple of them: use method='gather'"
        )
    if options.bias is not None:
        raise InvalidInput(f"method {method!r} got a bias, whose rows are this rank's; it needs all rows: use method='gather'")


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, problem: Problem, attend_heads: Attend) -> tuple[Tensor, Tensor]:
    """Returns o and lse of this rank's queries."""
    P, rank = problem.ranks.count, problem.ranks.rank
    H, Hk = q.shape[-2], k.shape[-2]
    if Hk < P:
        # each rank has one key head; its gradient is the sum over the copies
        k, v = (x.repeat_interleave(P // Hk, dim=-2) for x in (k, v))
    q, k, v = (_TokensToHeads.apply(x, problem) for x in (q, k, v))
    own = slice(rank * (H // P), (rank + 1) * (H // P))
    own_options = Options(None, some(options.alibi, (..., own)), some(options.sinks, own), options.seed)
    o, lse = attend_heads(q, k, v, own_options, own.start)
    o = _HeadsToTokens.apply(o, problem)
    lse = _HeadsToTokens.apply(lse.transpose(-1, -2).unsqueeze(-1), problem)
    return o, lse.squeeze(-1).transpose(-1, -2)


def attend_whole(
    mask: Mask, cu: tuple[int, ...] | None, settings: CallSettings, q: Tensor, k: Tensor, v: Tensor, options: Options, head: int
) -> tuple[Tensor, Tensor]:
    """Returns o and lse of heads from number `head` on, over a whole sequence."""
    seed = options.seed
    if seed is not None:
        sequences = range(q.shape[0] if cu is None else len(cu) - 1)
        seed = with_places(seed, tuple(Place(b, head, 0, 0) for b in sequences), q.device)
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    options = options._replace(seed=seed, cu_q=offsets, cu_k=offsets)
    return api.attend(q, k, v, mask, options, settings, is_packed=cu is not None)


class _TokensToHeads(torch.autograd.Function):
    """(..., tokens of this rank, all heads, dim) to (..., all tokens, heads of this rank, dim)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, problem: Problem) -> Tensor:
        ctx.problem = problem
        return _to_heads(x, problem)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(grad, ctx.problem), None


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, problem: Problem) -> Tensor:
        ctx.problem = problem
        return _to_tokens(x, problem)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grad, ctx.problem), None


def _to_heads(x: Tensor, problem: Problem) -> Tensor:
    ranks, held, sizes = problem.ranks, problem.held, problem.sizes
    own = x.unflatten(-2, (ranks.count, -1)).movedim(-3, 0).contiguous()  # (P, ..., tokens, heads of a rank, dim)
    width = own[0].numel() // max(x.shape[-3], 1) if x.shape[-3] else x.shape[:-3].numel() * own.shape[-2:].numel()
    got = x.new_empty(sum(sizes) * width)
    dist.all_to_all_single(got, own.view(-1), [size * width for size in sizes], [own[0].numel()] * ranks.count, group=ranks.group)
    found = x.new_empty((*x.shape[:-3], sum(sizes), *own.shape[-2:]))
    for part, size, parts in zip(got.split([size * width for size in sizes]), sizes, held, strict=True):
        _laid(part.view(*x.shape[:-3], size, *own.shape[-2:]), found, parts)
    return found


def _laid(part: Tensor, whole: Tensor, parts: tuple[tuple[int, int], ...]) -> None:
    before = 0
    for start, stop in parts:
        whole[..., start:stop, :, :] = part[..., before : before + stop - start, :, :]
        before += stop - start


def _to_tokens(x: Tensor, problem: Problem) -> Tensor:
    ranks, held, sizes = problem.ranks, problem.held, problem.sizes
    sent = torch.cat([torch.cat([x[..., a:b, :, :] for a, b in parts], dim=-3).reshape(-1) for parts in held])
    width = x.shape[:-3].numel() * x.shape[-2:].numel()
    own = sizes[ranks.rank]
    got = x.new_empty(ranks.count * own * width)
    dist.all_to_all_single(got, sent, [own * width] * ranks.count, [size * width for size in sizes], group=ranks.group)
    found = got.view(ranks.count, *x.shape[:-3], own, *x.shape[-2:])
    return found.movedim(0, -3).flatten(-3, -2)
