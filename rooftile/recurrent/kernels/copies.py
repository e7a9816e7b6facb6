"""Descriptors for the chip's copy engine: how the kernels load tiles of 16 bits on Hopper where all places are aligned.

A tile then goes from memory to shared memory without a thread's address or register, which is what the kernels are short of.
"""

from __future__ import annotations

from functools import cache, partial

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rooftile.runtime.launch import Kernel

# how much of each of four axes a tile takes
Box = tuple[int, int, int, int]
# bytes that a place, a stride and a row are a multiple of
_UNIT = 16


def is_aligned(x: Tensor) -> bool:
    """Whether x (batch, token, head, column), dense and with its last axis in one piece, can be copied tile by tile."""
    size = x.element_size()
    strides = (stride for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1)
    return x.data_ptr() % _UNIT == 0 and x.shape[-1] * size % _UNIT == 0 and all(n > 0 and n * size % _UNIT == 0 for n in strides)


def token_box(rows: int, columns: int) -> Box:
    """The box of a tile of a tensor (batch, token, head, column)."""
    return 1, rows, 1, columns


def state_box(columns: int, numbers: int) -> Box:
    """The box of a tile of states (chunk, head, P, N)."""
    return 1, 1, columns, numbers


@cache
def copying(kernel: Kernel, boxes: tuple[Box, ...]) -> Kernel:
    """The kernel with its first tensors as descriptors that copy such boxes; one for the same arguments."""
    return Kernel(kernel.fn, tuple(partial(_described, box=box) for box in boxes))


def _described(x: Tensor, box: Box) -> TensorDescriptor:
    return TensorDescriptor(x, *axes_of(x, box))


def axes_of(x: Tensor, box: Box) -> tuple[list[int], list[int], list[int]]:
    """Sizes, strides and a tile's sizes of the axes of x, the tile's axes last: only then does Triton take it as a matrix."""
    axes = sorted(range(4), key=lambda axis: box[axis] > 1)
    # an axis of one element is never stepped over, and may have any stride
    strides = [x.stride(axis) if x.shape[axis] > 1 else _UNIT for axis in axes[:-1]]
    return [x.shape[axis] for axis in axes], [*strides, 1], [box[axis] for axis in axes]
