"""The axes along which a call can be made smaller: dimensions that several of its tensors share.

They come from `rules`, or are found by trying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rooftile.diagnosis.experiments.call import RepeatableCall, held_bytes, operator_name
from rooftile.diagnosis.experiments.smaller.lists import is_listed, of_lists
from rooftile.diagnosis.experiments.smaller.rules import CHECK_SIZES, PRODUCTS, RESULTS, RULES, Places
from rooftile.diagnosis.watching.compiled import GeneratedKernel


@dataclass(frozen=True, slots=True)
class CallAxis:
    """Dimensions that are one: (which tensor of the call, which of its dimensions), all of one size."""

    places: Places
    size: int

    def cut(self, call: RepeatableCall, length: int) -> RepeatableCall:
        """Returns the call on the first `length` of this axis."""
        tensors = list(call.tensors)
        for which, dim in self.places:
            tensors[which] = tensors[which].narrow(dim, 0, length)
        return call.on(tensors)


@dataclass(frozen=True, slots=True)
class SmallerCall:
    """A smaller call, and the share of the whole one's work that it does."""

    call: RepeatableCall
    share: float


def axes(call: RepeatableCall) -> list[CallAxis]:
    """Returns the axes of a call, the ones to cut first at the front."""
    if isinstance(call.function, GeneratedKernel):
        # its sizes are compiled in: on smaller tensors it would read past their ends
        return []
    if is_listed(call):
        return [CallAxis(tuple((n, 0) for n in range(len(call.tensors))), sum(x.numel() for x in call.tensors))]
    name = operator_name(call.function)
    if name in RULES:
        found = [_axis(call, places) for places in with_result(call, RULES[name](call.tensors))]
        return [axis for axis in found if axis is not None and axis.size > 1]
    if call.device.type == "cuda" and not _checks_sizes(call):
        return []
    return _found(call)


def with_result(call: RepeatableCall, choices: Sequence[Places]) -> list[Places]:
    """Returns a rule's axes with the axes of the tensor in `out=`, if there is one; no axes where no rule has them."""
    if not isinstance(call.kwargs.get("out"), torch.Tensor):
        return list(choices)
    dims = RESULTS.get(operator_name(call.function), ())[-len(choices) :]
    last = len(call.tensors) - 1
    return [places if dim is None else (*places, (last, dim)) for places, dim in zip(choices, dims, strict=False)]


def piece(call: RepeatableCall, found: Sequence[CallAxis], share: float) -> SmallerCall:
    """Returns the call cut to about a share of its work: the first axes as far as needed.

    The largest of a product's axes is halved in turns, so that all of its tensors shrink. Of lists, fewer tensors are left.
    """
    if is_listed(call):
        return SmallerCall(*of_lists(call, share)) if share < 1 else SmallerCall(call, 1.0)
    lengths = [axis.size for axis in found]
    is_product = operator_name(call.function) in PRODUCTS
    left = share
    while left < 1.0 and any(length > 1 for length in lengths):
        at = max(range(len(found)), key=lambda n: lengths[n]) if is_product else _first(lengths)
        wanted = max(left, 0.5) if is_product else left
        length = max(1, round(lengths[at] * wanted))
        length = length if length < lengths[at] else lengths[at] - 1
        left *= lengths[at] / length
        lengths[at] = length
        if left > 0.75:
            break
    done = 1.0
    for axis, length in zip(found, lengths, strict=True):
        if length < axis.size:
            call, done = axis.cut(call, length), done * length / axis.size
    return SmallerCall(call, done)


def _first(lengths: Sequence[int]) -> int:
    return next(n for n, length in enumerate(lengths) if length > 1)


def _axis(call: RepeatableCall, places: Places) -> CallAxis | None:
    """Dimensions of size 1 are broadcast along the axis and stay as they are."""
    sizes = {call.tensors[which].shape[dim] for which, dim in places} - {1}
    if len(sizes) != 1:
        return None
    (size,) = sizes
    return CallAxis(tuple((which, dim) for which, dim in places if call.tensors[which].shape[dim] == size), size)


def _checks_sizes(call: RepeatableCall) -> bool:
    """Returns whether a GPU operator refuses tensors that do not fit each other.

    Others would read past an end, which takes the GPU away from this process for good. So does an index that is too large.
    """
    if any(x.dtype in (torch.int32, torch.int64) for x in call.tensors):
        return False
    tags = getattr(call.function, "tags", ())
    return torch.Tag.pointwise in tags or torch.Tag.reduction in tags or operator_name(call.function) in CHECK_SIZES


def _found(call: RepeatableCall) -> list[CallAxis]:
    """Tries each dimension of the largest tensor, from the one with the largest stride."""
    if not call.tensors:
        return []
    main = max(call.tensors, key=held_bytes)
    order = sorted(range(main.dim()), key=main.stride, reverse=True)
    kept: list[CallAxis] = []
    for dim in order:
        for places in (_aligned(call.tensors, main, dim), _aligned(call.tensors, main, dim - main.dim())):
            axis = _axis(call, places) if main.shape[dim] > 1 else None
            if axis is not None and _runs(call, [*kept, axis]):
                kept.append(axis)
                break
    return kept


def _aligned(tensors: Sequence[torch.Tensor], main: torch.Tensor, dim: int) -> Places:
    """The same dimension, counted from the front or from the back, of every tensor that has its size there."""
    size = main.shape[dim]
    return tuple(
        (n, dim) for n, x in enumerate(tensors) if -x.dim() <= dim < x.dim() and x.shape[dim] == size
    )  # fmt: skip


def _runs(call: RepeatableCall, found: Sequence[CallAxis]) -> bool:
    """A cut is an axis if the operator accepts it; the smallest call is tried, because it is short."""
    for axis in found:
        call = axis.cut(call, 1)
    try:
        call.restore()
        call.run()
    except (RuntimeError, IndexError, ValueError, TypeError):
        # this refusal is the answer: the dimension is not one that can be cut
        return False
    return True
