"""Launching a kernel again without looking it up again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def repeated(kernel: Any, programs: int, numbers: tuple[float, ...], constants: dict[str, Any]) -> Callable[..., None]:
    """`kernel` on `programs` programs, ready for tensors of the same dtypes and alignment: all else is fixed.

    The first launch goes Triton's usual way, which specialises on every argument to find the compiled kernel; the ones
    after it hand their arguments to that compiled kernel.
    """
    compiled = None
    grid = (programs, 1, 1)
    fixed = (*numbers, *(constants[name] for name in kernel.arg_names if name in constants))

    def launch(*tensors: Tensor) -> None:
        nonlocal compiled
        if compiled is None:
            # None under Triton's interpreter, which compiles nothing
            compiled = kernel[grid](*tensors, *numbers, **constants)
        else:
            compiled[grid](*tensors, *fixed)

    return launch
