"""Checks of the fused operations, and where their kernels run."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.numerics.quantised_rows import QuantisedRows, quantise_rows
from rooftile.runtime.devices import runs_kernels

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def kernels_run_on(x: Tensor) -> bool:
    """Whether kernels run on x that compute in fp32, which is too little for float64."""
    return runs_kernels(x) and x.dtype != torch.float64


def check_floats(**tensors: object) -> None:
    """Checks tensors (..., size) by their names: float, of at least one axis, on one device.

    Raises:
        InvalidInput: one is not.
    """
    first, place = None, ""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.dtype not in _FLOATS or not x.ndim:
            what = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInput(f"{name} is {what}; must be a tensor (..., size) of bfloat16, float16, float32 or float64")
        if first is None:
            first, place = x.device, name
        elif x.device != first:
            raise InvalidInput(f"{place} is on {first} and {name} on {x.device}; must be on one device")


def quantised_words(name: str) -> dict[str, str]:
    """Returns the answer to `out=`, which a function of this name had."""
    return {"out": f"call {name}_quantised(..., format=), which returns the codes"}


def checked(format: str) -> str:
    """Returns the name of a format of results.

    Raises:
        InvalidInput: there is none.
    """
    if format not in ("fp8", "int8"):
        raise InvalidInput(f"format is {format!r}; must be 'fp8' or 'int8'")
    return format


def quantised(y: Tensor, format: str) -> QuantisedRows:
    """Returns a result in a format, "fp8" or "int8".

    Raises:
        InvalidInput: there is no such format, or a gradient is wanted.
    """
    checked(format)
    if y.requires_grad:
        raise InvalidInput(
            f"format is {format!r} and a gradient is wanted, which rounding has none of; call it under torch.no_grad()"
        )
    return quantise_rows(y, format)
