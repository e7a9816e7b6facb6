"""The one answer to "does attention to a paged cache read the blocks in place, or a gathered copy of them?"

Kernels with a copy engine (Hopper's) are fast on some calls only: one query per sequence, or many. The others go to a kernel that
takes any number of queries and needs no copy engine. Validation, the backends, the engine's memory plan and its warm-up all ask
here, so they cannot disagree.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rooftile.exact.spec import Queries
from rooftile.kvcache.pages import PagedKV

# the smallest block, in tokens, that the copy engine reads in place: below it, a copy of the block costs more than its tokens
SMALLEST_BLOCK = 16
# tokens that the copy engine takes together: it steps from block to block by multiples of them
TOGETHER = 8
# queries per sequence, on average, from which the kernels for prompts are worth their start
PROMPT = 64
# queries per sequence, on average, from which it is faster to copy blocks below LARGE_BLOCK first than to read them in place
LONG_PROMPT = 8192
LARGE_BLOCK = 128
# the largest copy, in bytes: an engine keeps that much memory free, and a larger call goes to a kernel that needs no copy
MOST_GATHERED = 1 << 30


class Route(NamedTuple):
    """How a call to a paged cache is computed."""

    queries: Queries  # what a kernel may rely on, and a field of the call's Spec
    gather: bool  # kernels with a copy engine read a copy of the blocks; kernels without one never do


def route(
    queries: int, sequences: int, size: int, *, fp8: bool, copy_bytes: int, packed: bool = True, deterministic: bool = False,
    readable: bool = True, steppable: bool = True,
) -> Route:  # fmt: skip
    """Decides how a call is computed.

    Args:
        queries: the number of queries of all sequences together.
        sequences: the number of sequences.
        size: tokens per block.
        fp8: whether the cache is in FP8: only the kernel for one query reads its scales.
        copy_bytes: how many bytes a copy of all that the block tables have room for takes, in the queries' dtype.
        packed: whether sequences may differ in their number of queries.
        deterministic: whether a sequence's result may not depend on its neighbours; how the fast kernels divide work does.
        readable: whether the copy engine can read the blocks, by their strides and alignment.
        steppable: whether it can step from block to block, which it cannot where they overlap, as a view by heads does.

    Example:
        >>> route(3000, 2, 16, fp8=False, copy_bytes=1 << 20)
        Route(queries='many', gather=False)
        >>> route(3000, 2, 16, fp8=True, copy_bytes=1 << 20)
        Route(queries='many', gather=True)
    """
    if deterministic:
        return Route("any", gather=False)
    must = fp8 or size < SMALLEST_BLOCK
    if queries >= PROMPT * sequences and (not must or copy_bytes <= MOST_GATHERED):
        pays = size < LARGE_BLOCK and queries >= LONG_PROMPT * sequences and copy_bytes <= MOST_GATHERED
        return Route("many", gather=must or pays or not readable)
    if not packed and queries == sequences and size >= SMALLEST_BLOCK and steppable:
        return Route("one", gather=not readable)
    return Route("any", gather=False)


def route_of(q: Tensor, cache: PagedKV, *, deterministic: bool = False, readable: bool = True) -> Route:
    """The route of queries q (B, T, H, D), or packed (total, H, D), to a cache. Reads shapes and strides, and no data."""
    return route(
        q.shape[:-2].numel(),
        cache.table.shape[0],
        cache.size,
        fp8=cache.k_scale is not None,
        copy_bytes=cache.copy_bytes(q.dtype),
        packed=cache.cu_q is not None,
        deterministic=deterministic,
        readable=readable,
        steppable=_are_steppable(cache.k) and _are_steppable(cache.v),
    )


def _are_steppable(blocks: Tensor) -> bool:
    """Whether blocks (P, size, Hk, D) lie multiples of TOGETHER tokens apart."""
    step = TOGETHER * blocks.stride(1)
    return blocks.shape[0] <= 1 or (step > 0 and blocks.stride(0) % step == 0)
