"""Counts of calls on sparse and nested tensors: they compute and move the values that are stored, and the indices."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from rooftile.diagnosis.counts.arithmetic import MOVING, OPTIMISERS, POINTWISE, REDUCING, Arithmetic, Per
from rooftile.diagnosis.counts.traffic import base_name, is_plain, names, parts, tensors

# products of a sparse and a dense matrix
PRODUCTS = frozenset(names("mm addmm addmm_ _sparse_mm _sparse_addmm spmm sspaddmm mv addmv"))
# they build a sparse tensor of its parts, or take it to pieces
FORMING = frozenset(
    names(
        """_sparse_coo_tensor_with_dims_and_tensors _sparse_compressed_tensor_unsafe sparse_coo_tensor to_dense _to_dense
        to_sparse _to_sparse _coalesce coalesce _coalesced_ sparse_mask _sparse_mask_helper sparse_resize_
        sparse_resize_and_clear_ copy_sparse_to_sparse_"""
    )
)


def arithmetic(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Arithmetic | None:
    """Returns the arithmetic of one call with a sparse or nested tensor; None where no rule counts it."""
    name = base_name(func)
    given = list(tensors((args, tuple(kwargs.values()))))
    if name in PRODUCTS:
        sparse, dense = [x for x in given if not is_plain(x)], [x for x in given if is_plain(x)]
        if len(sparse) != 1 or not dense or sparse[0].is_nested:
            return None
        other = dense[-1]
        return Arithmetic(2 * _stored(sparse[0]) * (int(other.shape[-1]) if other.ndim > 1 else 1), 0)
    if name in MOVING or name in FORMING:
        return Arithmetic(0, 0)
    per = _per(name)
    if per is None:
        return None
    count = max((_stored(x) for x in [*given, *tensors(result)] if not is_plain(x)), default=0)
    return Arithmetic(per.flops * count, per.special * count)


def _per(name: str) -> Per | None:
    each = name.removeprefix("_foreach_").removesuffix("_")
    for table in (POINTWISE, REDUCING, OPTIMISERS):
        for word in (name, each):
            if word in table:
                return table[word]
    return None


def _stored(x: Tensor) -> int:
    """The values that a tensor stores."""
    held = parts(x)
    # the values of a sparse tensor come after its indices
    return sum(part.numel() for part in held) if x.is_nested else held[-1].numel() if held else 0
