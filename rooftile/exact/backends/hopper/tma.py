"""Descriptors for the chip's copy engine (TMA): a tensor's address, sizes, strides, and the box that one copy takes."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from rooftile.exact.backends.hopper.tiles import SWIZZLE_COLUMNS, SWIZZLE_ROWS, padded
from rooftile.runtime.hopper.gluon import TensorDescriptor, gl

# layout of a line of fp32 words in shared memory
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
    return TensorDescriptor(x, [shape[0], shape[2], shape[1], shape[3]], [b, h, t, 1], [1, *box], layout((1, *box), x.dtype))


def of_pages(x: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """(eight tokens, line, token, element) of pages (pages, size, heads, dim), copied a `box_of_pages` at a time.

    A page's eights follow each other, and a head's lines: `steps_of_pages` lie from page to page and from head to head. A
    number of eights below 0 is of no page.
    """
    _, size, heads, dim = x.shape
    lines = box[1]
    page, head = steps_of_pages(x)
    shape = [(len(x) - 1) * page + size // SWIZZLE_ROWS, (heads - 1) * head + lines, SWIZZLE_ROWS, dim // lines]
    strides = [SWIZZLE_ROWS * x.stride(1), _line_stride(x), x.stride(1), 1]
    return TensorDescriptor(x, shape, strides, list(box), layout(box, x.dtype))


def box_of_pages(dim: int, tokens: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns the box that one copy takes from a page: all lines of a head's elements, unless the last one is not full."""
    return tokens // SWIZZLE_ROWS, _lines(dim, dtype), SWIZZLE_ROWS, _columns(dim, dtype)


def steps_of_pages(x: Tensor) -> tuple[int, int]:
    """How many eights of tokens lie from one page (pages, size, heads, dim) to the next, and how many lines from head to head."""
    page = x.stride(0) // (SWIZZLE_ROWS * x.stride(1)) if len(x) > 1 else x.shape[1] // SWIZZLE_ROWS
    return page, x.stride(2) // _line_stride(x) if x.shape[2] > 1 else 1


def _columns(dim: int, dtype: torch.dtype) -> int:
    """Elements of a line: 128 bytes at most."""
    return min(SWIZZLE_COLUMNS * 2 // dtype.itemsize, padded(dim))


def _lines(dim: int, dtype: torch.dtype) -> int:
    return dim // _columns(dim, dtype) if padded(dim) == dim else 1


def _line_stride(x: Tensor) -> int:
    """From one line of a head's elements to the next, of the last axis; where there is one, from head to head."""
    dim = x.shape[3]
    return _columns(dim, x.dtype) if _lines(dim, x.dtype) > 1 or x.shape[2] == 1 else x.stride(2)


def are_readable(pages: Tensor) -> bool:
    """Whether the copy engine can read pages (pages, size, heads, dim) in place."""
    whole = len(pages) == 1 or pages.stride(0) % (SWIZZLE_ROWS * pages.stride(1)) == 0
    return is_readable(pages) and whole and (pages.shape[2] == 1 or pages.stride(2) % _line_stride(pages) == 0)


def line(x: Tensor, count: int) -> TensorDescriptor:
    """A contiguous tensor as one line of elements, copied `count` at a time."""
    return TensorDescriptor(x, [x.numel()], [1], [count], LINE)


@cache
def layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Returns the layout of a box in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])
