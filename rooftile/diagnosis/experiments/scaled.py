"""A recorded call with less or more to do: on a slice of its tensors, or with a dimension of a product grown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.diagnosis.compiled import Kernel
from rooftile.diagnosis.records import Sample

Run = Callable[[], Any]
# which arguments of an operator share the axis that is cut; others keep their size
CUT: dict[str, tuple[tuple[int, int], ...]] = {
    "mm": ((0, 0),),
    "addmm": ((1, 0),),
    "bmm": ((0, 0), (1, 0)),
    "baddbmm": ((0, 0), (1, 0), (2, 0)),
    "convolution": ((0, 0),),
    "embedding": ((1, 0),),
    "index_select": ((2, 0),),
}
# ... and the argument whose columns are grown, with those of the argument that must grow with it
GROWN: dict[str, tuple[int, int]] = {"mm": (0, 0), "addmm": (1, 0), "bmm": (0, 1), "baddbmm": (1, 1)}


class Scaled(NamedTuple):
    """A call on other sizes."""

    run: Run
    share: float  # its work over that of the whole call


def _name(sample: Sample) -> str:
    """"mm" of aten::mm."""
    return sample.operation.op.split("::")[-1]


def whole(sample: Sample) -> Run:
    """The recorded call."""
    return lambda: sample.function(*sample.args, **sample.kwargs)


def part(sample: Sample, share: float) -> Scaled | None:
    """The call on about `share` of its data, along a batch-like axis; None if no axis can be cut."""
    if isinstance(sample.function, Kernel):
        # its sizes are compiled in
        return None
    args = list(sample.args)
    axes = _columns(_name(sample), args) or CUT.get(_name(sample), ()) or _common_axis(args)
    axes = tuple((n, axis) for n, axis in axes if n < len(args) and isinstance(args[n], Tensor) and args[n].ndim > axis)
    if not axes:
        return None
    size = args[axes[0][0]].shape[axes[0][1]]
    count = max(1, round(size * share))
    if count >= size:
        return None
    for n, axis in axes:
        if args[n].shape[axis] == size:
            args[n] = args[n].narrow(axis, 0, count)
    return Scaled(lambda: sample.function(*args, **sample.kwargs), count / size)


def _columns(name: str, args: list[Any]) -> tuple[tuple[int, int], ...]:
    """The columns of a product that has more of them than rows: a slice of rows would read all of the weights."""
    if name not in ("mm", "addmm"):
        return ()
    first = name == "addmm"
    left, right = args[first], args[first + 1]
    if right.shape[1] <= left.shape[0]:
        return ()
    added = ((0, args[0].ndim - 1),) if first and args[0].ndim else ()
    return ((int(first) + 1, 1), *added)


def grown(sample: Sample, times: int) -> Scaled | None:
    """A product with `times` as many rows: the same weights are read, and all arithmetic is done so often; None for others."""
    name = _name(sample)
    if name not in GROWN:
        return None
    args = list(sample.args)
    n, axis = GROWN[name]
    args[n] = torch.cat([args[n]] * times, dim=axis)
    if name == "addmm" and args[0].ndim == 2 and args[0].shape[0] == sample.args[1].shape[0] > 1:
        args[0] = torch.cat([args[0]] * times)
    if name == "baddbmm" and args[0].shape[1] > 1:
        args[0] = torch.cat([args[0]] * times, dim=1)
    return Scaled(lambda: sample.function(*args, **sample.kwargs), float(times))


def _common_axis(args: list[Any]) -> tuple[tuple[int, int], ...]:
    """The first axis with more than one element of the largest tensor, in every tensor that has it in the same place."""
    tensors = [(n, x) for n, x in enumerate(args) if isinstance(x, Tensor)]
    if not tensors or any(isinstance(x, list | tuple) and any(isinstance(y, Tensor) for y in x) for x in args):
        return ()
    largest = max((x for _, x in tensors), key=lambda x: x.numel())
    axis = next((axis for axis, size in enumerate(largest.shape) if size > 1), None)
    if axis is None:
        return ()
    from_right = largest.ndim - axis
    found = []
    for n, x in tensors:
        # broadcasting lines axes up from the right
        at = x.ndim - from_right
        if at >= 0 and x.shape[at] == largest.shape[axis]:
            found.append((n, at))
    return tuple(found)
