"""Tensors whose pages all lie in the cache: a range of addresses that names the same few pages again and again.

A kernel that torch.compile has generated cannot run on a slice, because its sizes are compiled in. On such tensors it does all of
its work on data from the cache. Linux only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

from rooftile.errors import Unsupported

_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NO_RESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_FAILED = ctypes.c_void_p(-1).value


def aliased(x: torch.Tensor, block_bytes: int, parts: int) -> torch.Tensor:
    """Returns a tensor of the same shape and strides that holds `parts` blocks of x, each named again and again.

    Each of as many threads as there are parts reads and writes a block of its own, where each takes one stretch of the tensor.

    Args:
        x: on a CPU. Where it is no larger than the blocks, a copy is returned.
        block_bytes: rounded down to pages, at least one.
        parts: how many stretches it has.

    Raises Unsupported where the system has no such memory.
    """
    block = max(block_bytes // mmap.PAGESIZE, 1) * mmap.PAGESIZE
    span = (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()
    if x.numel() == 0 or span <= parts * block:
        return x.clone()
    if not hasattr(os, "memfd_create"):
        raise Unsupported("this system has no memory that two addresses name")
    source = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage(), x.storage_offset() * x.element_size(), (span,), (1,))
    # a stretch of each part, rounded up to blocks
    stretch = -(-span // (parts * block)) * block
    start, size = _mapped(parts, stretch, block)
    held = (ctypes.c_char * size).from_address(start)
    weakref.finalize(held, _library().munmap, ctypes.c_void_p(start), ctypes.c_size_t(size))
    memory = torch.frombuffer(held, dtype=torch.uint8)
    for part in range(parts):
        values = source[part * stretch : part * stretch + block]
        memory[part * stretch : part * stretch + len(values)] = values
    return torch.empty(0, dtype=x.dtype).set_(memory.untyped_storage(), 0, x.shape, x.stride())


def _mapped(parts: int, stretch: int, block: int) -> tuple[int, int]:
    """The start and size of a range of addresses in which every stretch repeats its block."""
    library, size = _library(), parts * stretch
    descriptor = os.memfd_create("rooftile")
    try:
        os.ftruncate(descriptor, parts * block)
        start = library.mmap(None, size, 0, _PRIVATE | _ANONYMOUS | _NO_RESERVE, -1, 0)
        if start == _FAILED:
            raise Unsupported("there are no addresses for it")
        for at in range(0, size, block):
            offset = at // stretch * block
            made = library.mmap(start + at, block, mmap.PROT_READ | mmap.PROT_WRITE, _SHARED | _FIXED, descriptor, offset)
            if made == _FAILED:
                library.munmap(ctypes.c_void_p(start), ctypes.c_size_t(size))
                raise Unsupported("the system allows no more mappings of memory")
    finally:
        os.close(descriptor)
    return start, size


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    return library
