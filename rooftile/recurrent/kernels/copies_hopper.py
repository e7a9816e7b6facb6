"""Descriptors of tiles and lines for Gluon kernels on Hopper, and the layout of their sums. It is imported on Hopper alone."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from torch import Tensor

from rooftile.recurrent.kernels.copies import Box, axes_of
from rooftile.runtime.hopper.gluon import TensorDescriptor, gl, gluon
from rooftile.runtime.launch import Kernel

# fp32 numbers of a line, one for each token of a chunk
LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


@gluon.constexpr_function
def accumulator(columns):
    """The layout of 64 rows of sums in a warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


def described(kernel: Any, *boxes: Box, line: int) -> Kernel:
    """A kernel that takes tiles of its first tensors, and then lines of numbers of the next one."""
    return Kernel(kernel, (*(partial(_tile, box=box) for box in boxes), partial(_line, count=line)))


def _tile(x: Tensor, box: Box) -> TensorDescriptor:
    shape, strides, box = axes_of(x, box)
    return TensorDescriptor(x, shape, strides, box, layout(tuple(box)))


def _line(x: Tensor, count: int) -> TensorDescriptor:
    return TensorDescriptor(x, [x.numel()], [1], [count], LINE)


@cache
def layout(box: tuple[int, ...]) -> gl.NVMMASharedLayout:
    """The layout of a tile of bf16 in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16)
