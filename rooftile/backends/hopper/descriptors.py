"""What the chip's copy engine (TMA) is told of a tensor: where it is, its sizes and strides, and the box that one copy takes."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from rooftile.backends.hopper.gluon import TensorDescriptor, gl

# of a line of fp32 words in shared memory
LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
}


def is_readable(x: Tensor) -> bool:
    """Whether the copy engine can read x in place: its last axis is contiguous, and all else a multiple of 16 bytes."""
    return x.data_ptr() % 16 == 0 and _is_readable(x.shape, x.stride(), x.element_size())


@lru_cache(maxsize=1024)
def _is_readable(shape: torch.Size, strides: tuple[int, ...], size: int) -> bool:
    unit = 16 // size
    outer = zip(shape[:-1], strides[:-1], strict=True)
    return strides[-1] == 1 and all(n == 1 or (stride > 0 and stride % unit == 0) for n, stride in outer)


def readable(x: Tensor) -> Tensor:
    """x, or a copy that the copy engine can read."""
    return x if is_readable(x) else x.clone(memory_format=torch.contiguous_format)


def descriptor(x: Tensor, box: tuple[int, int, int]) -> TensorDescriptor:
    """(batch, head, position, element) of a dense or packed tensor, copied a box of heads, positions and elements at a time.

    What a box covers past the end is zero when read and left alone when written.
    """
    shape, strides = x.shape, x.stride()
    if x.ndim == 3:
        shape, strides = (1, *shape), (0, *strides)
    # an axis of one element is never stepped over, and may have any stride
    b, t, h = (stride if n > 1 else 16 for n, stride in zip(shape[:3], strides[:3], strict=True))
    return TensorDescriptor(x, [shape[0], shape[2], shape[1], shape[3]], [b, h, t, 1], [1, *box], layout(box, x.dtype))


def line(x: Tensor, count: int) -> TensorDescriptor:
    """A contiguous tensor as one line of elements, copied `count` at a time."""
    return TensorDescriptor(x, [x.numel()], [1], [count], LINE)


@cache
def layout(box: tuple[int, int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of a box in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([1, *box], _DTYPES[dtype])
