"""Launching Triton and Gluon kernels: on the tensors' own device, and again without looking the kernel up again."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rooftile.kvcache import PagedKV

_HERE = nullcontext()


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return _HERE


def on_its_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` on the device of its first tensor."""

    def guarded(x: Tensor, *others: Tensor) -> Any:
        with device_of(x):
            return run(x, *others)

    return guarded


def repeated(kernel: Any, programs: int, numbers: tuple[float, ...], constants: dict[str, Any]) -> Callable[..., None]:
    """`kernel` on `programs` programs, ready for tensors of one device, dtypes and alignment: all else is fixed.

    The first launch goes Triton's usual way, which specialises on every argument to find the compiled kernel; the ones
    after it hand their arguments to that compiled kernel.
    """
    again: Any = None
    grid = (programs, 1, 1)
    fixed = (*numbers, *(constants[name] for name in kernel.arg_names if name in constants))

    def launch(*tensors: Tensor) -> None:
        nonlocal again
        if again is None:
            compiled = kernel[grid](*tensors, *numbers, **constants)
            # Triton's interpreter compiles nothing
            again = None if compiled is None else compiled[grid]
        else:
            # an address is taken as it is; of a tensor the launch asks where it lies
            again(*[x.data_ptr() for x in tensors], *fixed)

    return launch


def empties(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Makes empty contiguous tensors of one shape on the current device, which is to be `device`.

    On CUDA as the code that torch.compile writes does, past the dispatcher: in half the time of torch.empty.
    """
    quick = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if device.type != "cuda" or quick is None:
        return partial(torch.empty, shape, dtype=dtype, device=device)
    strides = tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))
    return partial(quick, shape, strides, dtype)


def scales_of(cache: PagedKV) -> tuple[Tensor, Tensor, int, int]:
    """The scales of a cache in FP8 and their strides; something in their place if it is in no such format."""
    k_scale, v_scale = cache.k_scale, cache.v_scale
    if k_scale is None or v_scale is None:
        return cache.lengths, cache.lengths, 0, 0
    if k_scale.stride() != v_scale.stride() or k_scale.stride(2) != 1:
        k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
    return k_scale, v_scale, k_scale.stride(0), k_scale.stride(1)
