"""A bias as the kernels read it: (batch, head, query, key) with a stride of 0 along what is broadcast, by the copy engine."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.exact.backends.hopper.tiles import BiasKind
from rooftile.exact.backends.hopper.tma import layout
from rooftile.exact.spec import Options, Sizes
from rooftile.runtime.hopper.gluon import TensorDescriptor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def bias_descriptor(x: Tensor, box: tuple[int, int]) -> TensorDescriptor:
    """(batch, head, query, key) of a bias, copied a box of queries and keys at a time; a broadcast axis has a stride of 0."""
    strides = [stride if n > 1 else 16 for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, *box], layout((1, 1, *box), x.dtype))


def readable_bias(bias: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """The bias broadcast to (batch, head, query, key), or a copy of it that the copy engine can read, broadcast."""
    bias = bias.expand(shape)
    if is_readable_bias(bias):
        return bias
    if bias.dtype not in _DTYPES:
        bias = bias.float()
    alone = bias[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in bias.stride()[:3])]
    unit = 16 // bias.element_size()
    # each query's keys begin at a multiple of 16 bytes
    room = alone.new_empty((*alone.shape[:3], -(-shape[3] // unit) * unit))
    return room[..., : shape[3]].copy_(alone).expand(shape)


def is_readable_bias(bias: Tensor) -> bool:
    """Whether the copy engine can read a bias (batch, head, query, key) in place."""
    unit = 16 // bias.element_size()
    outer = zip(bias.shape[:3], bias.stride()[:3], strict=True)
    steps = all(n == 1 or (stride >= 0 and stride % unit == 0) for n, stride in outer)
    return bias.dtype in _DTYPES and bias.data_ptr() % 16 == 0 and steps and (bias.stride(3) == 1 or bias.shape[3] == 1)


def contiguous(options: Options) -> Options:
    """The options as the kernels read them; a bias keeps its strides, and what is broadcast stays so."""
    return Options(options.bias, *[None if x is None else x.contiguous() for x in options[1:]])


def are_prepared(options: Options, sizes: Sizes) -> bool:
    """Whether the kernels read all options where they lie."""
    if options.bias is not None and not is_readable_bias(options.bias.expand(bias_shape(sizes))):
        return False
    return all(x is None or x.is_contiguous() for x in options[1:])


def bias_shape(sizes: Sizes) -> tuple[int, int, int, int]:
    """(batch, head, query, key); of at least one key, since a descriptor needs an element."""
    return sizes.B, sizes.H, sizes.T, max(sizes.S, 1)


def bias_kind(options: Options) -> BiasKind | None:
    """The bias as the kernels read it; None without one."""
    bias = options.bias
    if bias is None:
        return None
    # rows at one address would be copied one after the other
    one_row = bias.shape[2] == 1 or bias.stride(2) == 0
    return BiasKind(bias.element_size() if bias.dtype in _DTYPES else 4, one_row)
