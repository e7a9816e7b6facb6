"""The checks of arguments that the methods which choose keys share."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.arguments import is_causal
from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact import dispatch
from rooftile.runtime.arguments import check_backend, check_deterministic, shown, whole
from rooftile.runtime.devices import warn_without_triton
from rooftile.runtime.operators import mapped, transforms_active


def check_mask(method: str, mask: Any) -> bool:
    """Whether the mask is CAUSAL, for a method that has this mask and FULL."""
    return is_causal(method, mask, ", and chooses keys among those")


def check_way(backend: Any, deterministic: Any, scale: float) -> dict[str, Any] | None:
    """The options of the exact kernels that run a method; None for its definition."""
    way = check_backend(backend, tuple(dispatch.BACKENDS))
    check_deterministic(deterministic)
    if way == "eager":
        return None
    return {"backend": None if way == "auto" else way, "deterministic": deterministic, "scale": scale}


def in_kernels(method: str, options: dict[str, Any], reason: str | None, q: Tensor) -> bool:
    """Whether kernels of the method's own run a call, which they refuse for a reason or not; transforms take plain operations."""
    if options["backend"] not in (None, "triton") or transforms_active():
        return False
    if options["backend"] == "triton" and reason is not None:
        raise Unsupported(f"backend 'triton' cannot run {method}: {reason}")
    if options["backend"] is None:
        warn_without_triton(q.is_cuda)
    return reason is None


def check_seed(seed: Any) -> int:
    """A whole number that torch's generators take."""
    number = whole(seed)
    if number is None or not 0 <= number < 2**63:
        raise InvalidInput(f"seed is {shown(seed)}; must be an int from 0 to 2**63 - 1")
    return number


def check_fraction(name: str, value: Any) -> float:
    """A share of something: above 0, at most 1."""
    number = float(value) if isinstance(value, (int, float, numbers.Real)) and not isinstance(value, bool) else 0.0
    if not 0 < number <= 1:
        raise InvalidInput(f"{name} is {shown(value)}; must be a number above 0 and at most 1")
    return number


def check_indices(name: str, x: Any, shape: tuple[int | None, ...], due: str, like: Tensor) -> Tensor:
    """A tensor of integers of this shape, None for any size, on the device of `like`."""
    integers = isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64)
    if not integers or x.ndim != len(shape) or any(b is not None and a != b for a, b in zip(x.shape, shape, strict=True)):
        raise InvalidInput(f"{name} is {shown(x)}; must be an int32 tensor {due}")
    if x.device != like.device:
        raise InvalidInput(f"{name} is on {x.device}; q is on {like.device}, and all inputs must be on one device")
    return x


def check_range(name: str, x: Tensor, most: int, least: int = 0) -> None:
    """Raises InvalidInput for an index out of range, where it can be read without a wait for a device."""
    if x.device.type == "cpu" and x.numel() and not torch.compiler.is_compiling() and not mapped(x):
        low, high = int(x.min()), int(x.max())
        if low < least or high >= most:
            raise InvalidInput(f"{name} has values from {low} to {high}; must be from {least} to {most - 1}")


def as_given(x: Tensor) -> torch.autocast:
    """A context in which the products of a call are in the dtypes of its tensors, also where autocast is on."""
    return torch.autocast(x.device.type, enabled=False)
