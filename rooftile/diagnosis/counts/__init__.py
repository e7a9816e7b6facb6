"""Counts what one call of an operator computes and moves.

traffic     bytes, by storage
arithmetic  FLOPs and special functions
sparse      the same of sparse and nested tensors
custom      what users say of their own operators
fusable     whether a compiler fuses an operator into others
counters    the predicted counts beside the hardware's, which `ncu` reads with Nsight Compute
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch._ops import OpOverload

from rooftile.cost import counts as ours
from rooftile.diagnosis.counts import sparse
from rooftile.diagnosis.counts.arithmetic import arithmetic
from rooftile.diagnosis.counts.custom import GIVEN, counts
from rooftile.diagnosis.counts.traffic import base_name, bound, distinct, is_plain, names, nbytes, tensors, touched

__all__ = ["Counted", "count", "counts"]

# they make or rename tensors, and run nothing
FREE = frozenset(
    names(
        """detach detach_ alias _unsafe_view _reshape_alias empty empty_like empty_strided new_empty new_empty_strided resize_
        record_stream set_ is_coalesced _indices _values indices values crow_indices col_indices ccol_indices row_indices
        sparse_dim dense_dim _nnz _dimI _dimV is_pinned"""
    )
)


class Counted(NamedTuple):
    """One call; None where no rule counts it."""

    flops: int | None
    special: int | None
    bytes: int | None


def is_free(func: OpOverload) -> bool:
    """Whether a call runs nothing: a view, or memory that is left unfilled."""
    return bool(func.is_view) or base_name(func) in FREE or func.namespace == "profiler"


def count(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Counted:
    """Counts one call of an operator, as a TorchDispatchMode sees it."""
    given = GIVEN.get(func._schema.name)
    if given is not None:
        flops, moved = given
        return Counted(flops and flops(*args, **kwargs), 0 if flops else None, moved and moved(*args, **kwargs))
    if not all(is_plain(x) for x in tensors((args, tuple(kwargs.values()), result))):
        read, written = touched(func, args, kwargs, result)
        stored = sparse.arithmetic(func, args, kwargs, result)
        return Counted(stored and stored.flops, stored and stored.special, distinct(read) + distinct(written))
    found = arithmetic(func, args, kwargs, result)
    if func.namespace == "rooftile" and base_name(func) in ours.COUNTED:
        work = ours.work(base_name(func), tuple(bound(func, args, kwargs).values()), result)
        return Counted(work.flops, 0, work.read + work.written)
    if func.namespace not in ("aten", "prims") and found is None:
        # a foreign operator may touch anything
        return Counted(None, None, None)
    moved_bytes = nbytes(func, args, kwargs, result)
    return Counted(found and found.flops, found and found.special, moved_bytes) if found else Counted(None, None, moved_bytes)
