"""Linear attention over a sequence that several ranks hold: S, z and the running largest travel side by side, as one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.recurrent.linear import chunked
from rooftile.recurrent.linear.by_chunks import RunningSums, exp_of_difference
from rooftile.recurrent.linear.problem import Recurrence
from rooftile.recurrent.rule import Given, Run
from rooftile.recurrent.split.meeting import agree
from rooftile.recurrent.split.part import Part
from rooftile.recurrent.split.run import Problem, run


def recur_on_ranks(
    q: Tensor, k: Tensor, v: Tensor, state: RunningSums | None, problem: Recurrence, part: Part, keeps: bool, *,
    cu: Tensor | None = None, projection: Tensor | None = None,
) -> tuple[Tensor, RunningSums | None]:  # fmt: skip
    """Computes `recur` over the tokens of all ranks: o of this rank's, and with `keeps` the last sums, on every rank."""
    if not problem.causal:
        raise Unsupported("linear attention with a group under FULL; has CAUSAL: gather the sequence, or leave out group=")
    if problem.backend == "eager":
        raise Unsupported("backend 'eager' of linear attention with a group; has 'triton' and 'tiled'")
    if problem.backend == "triton" and (reason := chunked.refusal(q, v, problem)) is not None:
        raise Unsupported(f"backend 'triton' cannot run this recurrence: {reason}")
    first = chunked.first_sums(q, k, v, state, problem, cu, projection)
    if not problem.scaled:
        # without exponents nothing is relative to a largest one
        first = first._replace(largest=torch.zeros_like(first.largest))
    sizes = first.s.shape[-2], first.s.shape[-1]
    shared = {**first._asdict(), "projection": projection}
    agree(part, "linear attention", {"q": q, "k": k, "v": v}, shared, options=problem, keeps=keeps)
    o, last = run(Problem(LinearOnRank(problem, sizes), part, keeps), (q, k, v, projection), packed(first))
    if last is None:
        return o, None
    sums = unpacked(last, sizes)
    return o, sums._replace(largest=sums.largest.detach())


class LinearOnRank:
    """Causal linear attention as the recurrence of one rank; tensors are q, k, v and the projection.

    Args:
        problem: its options.
        sizes: F and Dv.
    """

    tokens, like = 3, 0

    def __init__(self, problem: Recurrence, sizes: tuple[int, int]) -> None:
        self._problem, self._sizes = problem, sizes
        self.carry = SumsCarry(problem.scaled)

    def empty(self, tensors: Given) -> Tensor:
        q, _, v, _ = tensors
        return q.new_empty((*q.shape[:-1], v.shape[-1]))

    def forward(self, tensors: Given, state: Tensor, cu: Tensor | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        q, k, v, projection = tensors
        arguments = (q, k, v, *unpacked(state, self._sizes), None, projection, cu, self._problem.scale, self._problem.code)
        o, den, *last = chunked.run_forward(arguments)
        return o, packed(RunningSums(*last)), (o, den)

    def backward(
        self, dy: Tensor, d_last: Tensor, tensors: Given, state: Tensor, cu: Tensor | None, kept: Given
    ) -> tuple[list[Tensor | None], Tensor]:
        q, k, v, projection = tensors
        ds, dz, _ = unpacked(d_last, self._sizes)
        sums = unpacked(state, self._sizes)
        dq, dk, dv, ds, dz = chunked.run_backward(
            (dy.contiguous(), ds, dz, *kept, q, k, v, *sums, None, projection, cu, self._problem.scale, self._problem.code)
        )
        return [dq, dk, dv, None], packed(RunningSums(ds, dz, torch.zeros_like(sums.largest)))

    def end(self, tensors: Given, state: Tensor) -> Tensor:
        q, k, v, projection = tensors
        last = chunked.run_end(q, k, v, unpacked(state, self._sizes), projection, self._problem)
        return self.forward(tensors, state, None)[1] if last is None else packed(last)

    def end_with_map(self, tensors: Given, state: Tensor) -> tuple[Tensor, Tensor]:
        # the state itself has the largest
        return state.new_ones(self.carry.shape(tuple(state.shape))), self.end(tensors, state)

    def begin(self, dy: Tensor, d_last: Tensor, tensors: Given, state: Tensor, kept: Given) -> Tensor:
        q, k, v, projection = tensors
        ds, dz, _ = unpacked(d_last, self._sizes)
        first = unpacked(state, self._sizes)
        found = chunked.run_begin(dy, ds, dz, kept, q, k, v, first, projection, self._problem)
        if found is None:
            return self.backward(dy, d_last, tensors, state, None, kept)[1]
        return packed(RunningSums(*found, torch.zeros_like(first.largest)))


class SumsCarry:
    """The carry of sums (rows, Hk, F Dv + F + 1): they are added, each relative to the largest exponent that it has met.

    Args:
        scaled: whether there are such exponents.
    """

    def __init__(self, scaled: bool) -> None:
        self._scaled = scaled

    def shape(self, state: tuple[int, ...]) -> tuple[int, ...]:
        return state[:2]

    def nothing(self, state: tuple[int, ...], like: Tensor) -> Tensor:
        found = like.new_zeros(state)
        if self._scaled:
            found[..., -1] = float("-inf")
        return found

    def memory(self, state: tuple[int, ...]) -> int | None:
        return None

    def map(self, run: Run, tokens: Given, constants: Given, state: Tensor, options: Given) -> Tensor:
        return state.new_ones(self.shape(tuple(state.shape)))

    def join(self, map: Tensor, before: Tensor, own: Tensor) -> Tensor:
        if not self._scaled:
            return before + own
        largest = torch.maximum(before[..., -1], own[..., -1])
        sums = [exp_of_difference(x[..., -1], largest)[..., None] * x[..., :-1] for x in (before, own)]
        return torch.cat((sums[0] + sums[1], largest[..., None]), -1)

    def back(self, map: Tensor, grad: Tensor) -> Tensor:
        return map[..., None] * grad

    def turned(self, map: Tensor, before: Tensor, behind: Tensor) -> Tensor:
        return exp_of_difference(before[..., -1], behind[..., -1]) if self._scaled else map


def packed(sums: RunningSums) -> Tensor:
    """Returns S, z and the largest as one tensor (rows, Hk, F Dv + F + 1)."""
    return torch.cat((sums.s.flatten(2), sums.z, sums.largest[..., None]), -1)


def unpacked(state: Tensor, sizes: tuple[int, int]) -> RunningSums:
    """Returns S (rows, Hk, F, Dv), z (rows, Hk, F) and the largest (rows, Hk)."""
    F, Dv = sizes
    s, z, largest = state.split((F * Dv, F, 1), -1)
    return RunningSums(s.unflatten(-1, (F, Dv)).contiguous(), z.contiguous(), largest.squeeze(-1).contiguous())
