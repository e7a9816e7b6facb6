"""What the chip's copy engine (TMA) is told of a tensor: where it is, its sizes and strides, and the box that one copy takes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rooftile.backends.hopper.gluon import TensorDescriptor, gl

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def readable(x: Tensor) -> Tensor:
    """x, or a copy if the copy engine cannot read it: its last axis is contiguous, and all else a multiple of 16 bytes."""
    strides = x.stride()
    fits = strides[-1] == 1 and x.data_ptr() % 16 == 0
    for n, stride in zip(x.shape[:-1], strides[:-1], strict=True):
        fits = fits and (n == 1 or (stride > 0 and stride * x.element_size() % 16 == 0))
    return x if fits else x.contiguous()


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """(batch, head, position, element) of a dense or packed tensor, copied `rows` positions and `columns` elements at a time.

    What a box covers past the end is zero when read and left alone when written.
    """
    shape, strides = x.shape, x.stride()
    if x.ndim == 3:
        shape, strides = (1, *shape), (0, *strides)
    # an axis of one element is never stepped over, and may have any stride
    b, t, h = (stride if n > 1 else 16 for n, stride in zip(shape[:3], strides[:3], strict=True))
    box = [1, 1, rows, columns]
    return TensorDescriptor(x, [shape[0], shape[2], shape[1], shape[3]], [b, h, t, 1], box, _layout(rows, columns, x.dtype))


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], _DTYPES[dtype])
