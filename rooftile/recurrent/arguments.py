"""The checks of a caller's tensors: shapes whose axes have names, dtypes, states and offsets; one sentence where one is wrong."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.recurrent.rule import wide_dtype
from rooftile.runtime.arguments import shown
from rooftile.runtime.operators import transformed
from rooftile.runtime.tensors import autocast

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BACKENDS = ("triton", "tiled", "eager")


def check_shapes(tensors: Mapping[str, tuple[Any, str]], sizes: dict[str, int]) -> dict[str, int]:
    """Checks that tensors have their axes, and that an axis of one name has one size.

    Args:
        tensors: by name the tensor, and the names of its axes such as "B T H P"; "B T H|1" for an axis that may be 1.
        sizes: the sizes that are known.

    Returns:
        The sizes of all axes.
    """
    where: dict[str, str] = {}
    for name, (x, axes) in tensors.items():
        if not isinstance(x, Tensor):
            raise InvalidInput(f"{name} is {shown(x)}; must be a tensor ({', '.join(axes.split())})")
        names = axes.split()
        if x.ndim != len(names):
            raise InvalidInput(f"{name} is {tuple(x.shape)}; must have {len(names)} axes ({', '.join(names)})")
        for axis, size in zip(names, x.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                due = f"{sizes[axis]}, as in {where[axis]}" if axis in where else str(sizes[axis])
                raise InvalidInput(f"{name} is {tuple(x.shape)}, so {axis} is {size}; {axis} must be {due}")
            where.setdefault(axis, name)
    return sizes


def check_dtypes(x: Tensor, alike: Mapping[str, Tensor | None], wide: Mapping[str, Tensor | None]) -> None:
    """Checks that tensors are floating, on one device, `alike` in the dtype of x, and `wide` in that or in fp32."""
    if x.dtype not in FLOATS:
        raise InvalidInput(f"x is {x.dtype}; must be float32, bfloat16, float16 or float64")
    for name, other in {**alike, **wide}.items():
        if other is None:
            continue
        due = (x.dtype,) if name in alike else (x.dtype, wide_dtype(x))
        if other.dtype not in due:
            raise InvalidInput(f"{name} is {other.dtype}; must be {' or '.join(str(d) for d in dict.fromkeys(due))}")
        if other.device != x.device:
            raise InvalidInput(f"{name} is on {other.device}; must be on {x.device}, as the other tensors")


def check_groups(heads: int, groups: int, heads_name: str = "H", groups_name: str = "G") -> None:
    """Checks that the heads are a multiple of the groups."""
    if groups < 1 or heads % groups:
        raise InvalidInput(
            f"{heads_name} is {heads} and {groups_name} is {groups}; {heads_name} must be a multiple of {groups_name}"
        )


def check_state(state: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Returns the first state: zeros where none is given."""
    if state is None:
        return torch.zeros(shape, dtype=dtype, device=like.device)
    if not isinstance(state, Tensor):
        raise InvalidInput(f"{name} is {shown(state)}; must be a tensor {shape} of {dtype}, or None")
    if tuple(state.shape) != shape or state.dtype != dtype or state.device != like.device:
        raise InvalidInput(
            f"{name} is {state.dtype} {tuple(state.shape)} on {state.device}; must be {dtype} {shape} on {like.device}"
        )
    return state


def check_rows(state: Any, name: str, axes: str, slots: Any, sizes: dict[str, int]) -> Tensor | None:
    """Checks the states of a step, and the row of each token."""
    if not isinstance(state, Tensor) or state.dtype not in FLOATS:
        raise InvalidInput(f"{name} is {shown(state)}; must be a tensor ({axes.replace(' ', ', ')}) of a floating dtype")
    if any(size > 1 and not stride for size, stride in zip(state.shape, state.stride(), strict=True)):
        raise InvalidInput(
            f"{name} is expanded, strides {state.stride()}; must have memory for each number, for it is changed: clone it"
        )
    if slots is None:
        check_shapes({name: (state, axes.replace("rows", "S"))}, sizes)
        return None
    check_shapes({name: (state, axes), "slots": (slots, "S")}, sizes)
    if slots.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(f"slots is {slots.dtype}; must be int32 or int64")
    return slots


def check_values(name: str, x: Tensor, good: str) -> None:
    """Checks that all numbers of a tensor are "at most 0" or "at least 0"; where this would wait for a GPU, it does not."""
    if torch.compiler.is_compiling() or transformed() or x.device.type != "cpu":
        return
    x = x.detach()
    wrong = x > 0 if good == "at most 0" else x < 0
    if bool(wrong.any()):
        raise InvalidInput(f"{name} has {float(x[wrong].flatten()[0]):g}; must be {good}")


def check_limits(limits: Any) -> tuple[float, float]:
    """Returns the least and the largest step."""
    if not isinstance(limits, tuple | list) or len(limits) != 2 or not all(isinstance(x, numbers.Real) for x in limits):
        raise InvalidInput(f"dt_limit is {shown(limits)}; must be two numbers, such as (0.0, float('inf'))")
    low, high = float(limits[0]), float(limits[1])
    # false for NaN as well; torch.compile may have made symbols of both
    if not 0 <= low <= high:
        raise InvalidInput(f"dt_limit is {(low, high)}; must be two numbers from 0 on, the second no less than the first")
    return low, high


def narrowed(*tensors: Any) -> tuple[Any, ...]:
    """Returns tensors in the dtype of autocast where it is on; others as they are."""
    first = next((x for x in tensors if isinstance(x, Tensor)), None)
    if first is None or first.is_meta or not torch.is_autocast_enabled(first.device.type):
        return tensors
    return tuple(map(autocast, tensors))
