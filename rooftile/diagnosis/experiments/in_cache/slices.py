"""E5: the operator on a slice that stays in the cache, as often as the whole needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from rooftile.diagnosis.experiments.call import RepeatableCall, operator_name
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.experiments.in_cache.pages import aliased
from rooftile.diagnosis.experiments.smaller.axes import CallAxis, piece
from rooftile.diagnosis.experiments.timing import Timer, interleaved, low
from rooftile.diagnosis.watching.compiled import GeneratedKernel
from rooftile.errors import Unsupported

# a slice that is this many times larger than the cache does not stay in it
SLACK = 2.0


def cached_share(
    call: RepeatableCall, axes: Sequence[CallAxis], timer: Timer, budget_s: float, deadline: Deadline | None = None, *,
    cold: bool = True,
) -> float:  # fmt: skip
    """Returns the share of its time that the whole call would take if its data were in the cache; 1 - g.

    A slice runs again and again; on a CPU on each thread by itself, whose time is compared with all threads' time for the whole.
    The cost of a slice's call is taken out: it is measured on the smallest slice, and the whole call has it once.

    Raises Unsupported where no slice fits the cache, or where the deadline comes first.
    """
    if isinstance(call.function, GeneratedKernel):
        return _aliased_share(call, timer, budget_s, deadline, cold)
    if operator_name(call.function) == "attention_paged":
        return _cached_share(call, same_pages(call, timer), timer, budget_s, deadline, cold)
    cut = sorted({place for axis in axes for place, _ in axis.places})
    small, part = call, 1.0
    for share in _shares(call, cut, timer):
        if share < 1:
            made = piece(call, axes, share)
            small, part = packed(made.call), made.share
        if small.bytes(cut) <= timer.cache_bytes:
            break
    if small.bytes(cut) > SLACK * timer.cache_bytes:
        raise Unsupported("no slice of it fits the cache")
    least = piece(call, axes, 0.0) if axes else None
    # nothing would be left of a slice that is nearly the least itself
    has_least = least is not None and least.share < part / 8
    works = {"whole": partial(timer.used, call, cold=cold), "slice": partial(timer.burst, small)}
    if least is not None and has_least:
        works["least"] = partial(timer.burst, packed(least.call))
    taken = {name: low(samples) for name, samples in interleaved(works, budget_s, deadline).items()}
    call_us = taken.get("least", 0.0)
    if part == 1.0:
        return taken["slice"] / taken["whole"]
    return (max(taken["slice"] - call_us, 0.0) / part + call_us) / taken["whole"]


def _aliased_share(
    call: RepeatableCall, timer: Timer, budget_s: float, deadline: Deadline | None, cold: bool
) -> float:  # fmt: skip
    """The share of its time that a compiled kernel takes on tensors of its sizes whose pages all lie in the cache."""
    if call.device.type != "cpu":
        raise Unsupported("its sizes are compiled in, so it runs on no slice")
    # each thread has a cache of its own
    cached = call.on([aliased(x, timer.cache_bytes // len(call.tensors), torch.get_num_threads()) for x in call.tensors])
    return _cached_share(call, cached, timer, budget_s, deadline, cold)


def same_pages(call: RepeatableCall, timer: Timer) -> RepeatableCall:
    """Returns paged attention whose tables name a few blocks again and again."""
    tensors = list(call.tensors)
    keys, values, table = tensors[1:4]
    block_bytes = keys[:1].nbytes + values[:1].nbytes
    tensors[3] = table.clamp(min=0) % max(1, min(len(keys), timer.cache_bytes // block_bytes))
    return call.on(tensors)


def _cached_share(
    call: RepeatableCall, cached: RepeatableCall, timer: Timer, budget_s: float, deadline: Deadline | None, cold: bool
) -> float:  # fmt: skip
    works = {"whole": partial(timer.used, call, cold=cold), "near": partial(timer.used, cached, cold=False)}
    taken = {name: low(samples) for name, samples in interleaved(works, budget_s, deadline).items()}
    return taken["near"] / taken["whole"]


def packed(call: RepeatableCall) -> RepeatableCall:
    """Returns the call on tensors without gaps, whose dimensions have the same order; a table has the rows that are read only.

    Rows that lie a power of two apart fall into the same few places of a cache, and would not stay in it. Rows all over a large
    table have addresses that need a cache of their own.
    """
    tensors = [_packed(x) for x in call.tensors]
    if operator_name(call.function) == "embedding":
        rows, places = torch.unique(tensors[1], return_inverse=True)
        tensors[:2] = tensors[0][rows], places.to(tensors[1].dtype)
    return call.on(tensors)


def _packed(x: torch.Tensor) -> torch.Tensor:
    if 0 in x.stride():
        return x
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    back = [order.index(dim) for dim in range(x.dim())]
    return x.permute(order).contiguous().permute(back)


def _shares(call: RepeatableCall, cut: list[int], timer: Timer) -> list[float]:
    """Shares to try, from the one that fits if all bytes shrink with the work."""
    first = min(1.0, timer.cache_bytes / max(call.bytes(cut), 1))
    return [first, first / 4, first / 16, first / 64, 0.0] if first < 1 else [1.0]
