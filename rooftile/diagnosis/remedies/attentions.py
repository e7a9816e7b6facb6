"""The attentions of a step: a fused operator's calls, and products around a softmax that stand for one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rooftile.diagnosis.counts.traffic import bound
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.records import OperatorRow, Sample, StepCall
from rooftile.diagnosis.remedies.alone import times_us
from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact.api import attention
from rooftile.exact.masks import CAUSAL, FULL, Mask

FUSED = "aten::_scaled_dot_product_"
SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")
PRODUCTS = ("aten::bmm", "aten::baddbmm")
DROPOUT = ("aten::bernoulli_", "aten::native_dropout")
# an attention written by hand has its products at most this many calls before and after its softmax
REACH = 12
# timings of a dropout take this share, as its own is not known
DROPPED = 0.1


@dataclass(frozen=True, slots=True)
class StepAttention:
    """One attention of a step."""

    rows: frozenset[int]  # all of its operators, the backward's too
    calls: int
    main: int  # the row of the fused operator or the softmax
    q: tuple[int, ...]  # in Rooftile's order, batch, length, heads, head dim
    k: tuple[int, ...]
    v: tuple[int, ...]
    backward: bool
    fused: bool
    dropout: bool


def find_attentions(operations: Sequence[OperatorRow], calls: Sequence[StepCall]) -> list[StepAttention]:
    """Returns the attentions of a step, one for each module."""
    found = []
    for row, operation in enumerate(operations):
        if operation.phase == "forward" and operation.op.startswith(FUSED) and "backward" not in operation.op:
            found.append(_fused(row, operation, operations))
        elif operation.op in SOFTMAX and operation.phase == "forward":
            found.append(_by_hand(row, operation, operations, calls))
    return [one for one in found if one is not None]


def time_ours(
    one: StepAttention, sample: Sample | None, device: torch.device, call_us: float, deadline: Deadline
) -> tuple[dict[str, float], str] | None:  # fmt: skip
    """Times `rooftile.attention` and PyTorch's fused one on the shapes of an attention of the step.

    Args:
        one: the attention.
        sample: a recorded call of its main operator: its mask is seen there.
        device: of the step.
        call_us: the time of its own operators for one call.
        deadline: of each run.

    Returns the times in µs of one call (and its backward, where the step has one) by name, and the line to write; None if the
    mask of the step cannot be written for it, or there is no time.
    """
    given = _inputs(one, sample, device)
    if given is None:
        return None
    q, k, v, mask, bias = given
    if one.backward:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    dropout = DROPPED if one.dropout else 0.0
    options = [", rt.CAUSAL"] * (mask is CAUSAL) + [", bias=bias"] * (bias is not None) + [", dropout=p"] * one.dropout
    words = f"rt.attention(q, k, v{''.join(options)})"

    def ours(backend: str | None) -> Callable[[], Tensor]:
        return lambda: attention(q, k, v, mask, bias=bias, dropout=dropout, backend=backend)

    works = {"default": ours(None)} if one.fused else {"default": ours(None), "sdpa": ours("sdpa")}
    times = {}
    for name, work in works.items():
        # the first run prepares
        if not deadline.allows(2 * call_us / 1e6):
            break
        try:
            times[name] = _time_us(work, (q, k, v) if one.backward else (), device)
        except (InvalidInput, Unsupported, torch.OutOfMemoryError):
            # an attention that refuses is no choice; the others remain
            continue
    return (times, words) if times else None


def _fused(row: int, operation: OperatorRow, operations: Sequence[OperatorRow]) -> StepAttention | None:
    shapes = [kind[0] for kind in operation.key[4:] if isinstance(kind, tuple)][:3]
    if len(shapes) < 3 or any(len(shape) != 4 for shape in shapes):
        return None
    # PyTorch's order is (B, H, T, D)
    q, k, v = ((b, t, h, d) for b, h, t, d in shapes)
    backward = {
        n for n, other in enumerate(operations)
        if other.module == operation.module and other.op.startswith(FUSED) and "backward" in other.op
    }  # fmt: skip
    return StepAttention(frozenset({row, *backward}), operation.calls, row, q, k, v, bool(backward), True, False)


def _by_hand(
    row: int, operation: OperatorRow, operations: Sequence[OperatorRow], calls: Sequence[StepCall]
) -> StepAttention | None:
    """An attention around a softmax: a product, pointwise operators, the softmax, pointwise operators, a product."""
    at = operation.indices[0]
    before = _walk(range(at - 1, max(-1, at - 1 - REACH), -1), calls, operations, set(calls[at].reads), from_writes=True)
    after = _walk(range(at + 1, min(len(calls), at + 1 + REACH)), calls, operations, set(calls[at].writes), from_writes=False)
    if before is None or after is None:
        return None
    first, second = (operations[calls[index].row] for index in (before[-1], after[-1]))
    (bh, t, d), (_, _, s) = _factors(first)
    (_, t_again, s_again), (_, _, dv) = _factors(second)
    if (t, s) != (t_again, s_again):
        return None
    scores = bh * t * s
    # masks of fewer elements than the scores are made once, and remain
    of_scores = {
        calls[i].row for i in range(before[-1], after[-1] + 1)
        if calls[i].pointwise and _within(operations[calls[i].row], operation) and _most(calls[i].writes) >= scores
    }  # fmt: skip
    forward = of_scores | {calls[before[-1]].row, calls[after[-1]].row}
    backward = {
        n for n, other in enumerate(operations)
        if other.phase == "backward" and _within(other, operation) and _works_on(other, scores)
    }  # fmt: skip
    return StepAttention(
        frozenset({row, *forward, *backward}), operation.calls, row, (bh, t, 1, d), (bh, s, 1, d), (bh, s, 1, dv),
        bool(backward), False, any(operations[row].op in DROPOUT for row in forward),
    )  # fmt: skip


def _walk(
    steps: range, calls: Sequence[StepCall], operations: Sequence[OperatorRow], tensors: set[int], *, from_writes: bool
) -> list[int] | None:  # fmt: skip
    """The calls from a softmax to the nearest product that its numbers come from or go to; None if there is none."""
    found: list[int] = []
    for index in steps:
        call = calls[index]
        near, far = (call.writes, call.reads) if from_writes else (call.reads, call.writes)
        if not tensors & near.keys():
            continue
        if operations[call.row].op in PRODUCTS:
            return [*found, index]
        # another operator leads elsewhere, such as to the making of a mask
        if call.pointwise:
            found.append(index)
            tensors |= far.keys()
    return None


def _within(operation: OperatorRow, other: OperatorRow) -> bool:
    """Whether an operator runs in the module of another one, or in a part of it, such as its dropout."""
    return operation.module == other.module or operation.module.startswith(f"{other.module}.")


def _factors(operation: OperatorRow) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the two factors of a batched product."""
    shapes = [kind[0] for kind in operation.key[4:] if isinstance(kind, tuple)]
    return tuple(shapes[-2]), tuple(shapes[-1])


def _works_on(operation: OperatorRow, scores: int) -> bool:
    """Whether an operator reads as many numbers as there are scores, or is a product that writes as many."""
    sizes = [prod(kind[0]) for kind in operation.key[4:] if isinstance(kind, tuple) and kind[0]]
    if operation.op in PRODUCTS:
        (batch, rows, _), (_, _, columns) = _factors(operation)
        sizes.append(batch * rows * columns)
    return scores in sizes


def _most(sizes: Mapping[int, int]) -> int:
    return max(sizes.values(), default=0)


def _inputs(
    one: StepAttention, sample: Sample | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Mask, Tensor | None] | None:  # fmt: skip
    if sample is None:
        return None
    if not one.fused:
        mask = _mask_of(sample.args[0])
        dtype = sample.args[0].dtype
        q, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in (one.q, one.k, one.v))
        return None if mask is None else (q, k, v, mask, None)
    given = bound(sample.function, sample.args, sample.kwargs)  # type: ignore[arg-type]
    if given.get("dropout_p"):
        return None
    bias = given.get("attn_mask", given.get("attn_bias"))
    q, k, v = (given[word].transpose(1, 2) for word in ("query", "key", "value"))
    return q, k, v, CAUSAL if given.get("is_causal") else FULL, bias


def _mask_of(scores: Tensor) -> Mask | None:
    """The mask that scores show: scores of hidden keys are -inf, or nearly."""
    hidden = scores.flatten(0, -3)[0] < -1e4
    if not hidden.any():
        return FULL
    t, s = hidden.shape
    causal = torch.ones(t, s, dtype=torch.bool, device=scores.device).tril(s - t).logical_not()
    return CAUSAL if torch.equal(hidden, causal) else None


def _time_us(work: Callable[[], Tensor], inputs: Collection[Tensor], device: torch.device) -> float:
    """The time of a call in µs, and of its backward if there are inputs to differentiate by."""

    def both() -> None:
        torch.autograd.grad(work().sum(), tuple(inputs))

    with torch.enable_grad() if inputs else torch.no_grad():
        return times_us([both if inputs else work], device)[0]
