"""The devices of the Triton kernels outside attention: CUDA tensors, and CPU tensors in Triton's interpreter."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import util
from typing import Any

from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.launch import INTERPRETED
from rooftile.numerics.rows import quantise_rows


def runs_on(x: Tensor) -> bool:
    """Whether Triton's kernels run on x. Otherwise PyTorch's own operations compute the same.

    That includes CUDA tensors without Triton, with one warning: the result is correct, but slower.
    """
    if not x.is_cuda:
        return INTERPRETED and x.device.type == "cpu"
    return _triton_is_installed()


@cache
def _triton_is_installed() -> bool:
    if util.find_spec("triton") is not None:
        return True
    warnings.warn(
        "Triton is not installed, so CUDA tensors are normalised, gated, rotated, cached and sampled by PyTorch's own "
        "operations, which are slower: install triton 3.6 or newer",
        stacklevel=3,
    )
    return False


def checked(out: str) -> str:
    """Returns the name of a format of results.

    Raises:
        InvalidInput: there is none.
    """
    if out not in ("fp8", "int8"):
        raise InvalidInput(f"out is {out!r}; must be fp8, int8 or None")
    return out


def quantised(y: Tensor, out: str | None) -> Any:
    """Returns a result in the format that is asked for, "fp8" or "int8": `rooftile.numerics.QuantisedRows`, without gradient.

    Raises:
        InvalidInput: there is no such format, or a gradient is wanted.
    """
    if out is None:
        return y
    checked(out)
    if y.requires_grad:
        raise InvalidInput(f"out is {out!r} and a gradient is wanted, which rounding has none of; call it under torch.no_grad()")
    return quantise_rows(y, out)
