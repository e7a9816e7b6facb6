"""Bytes that operators other than attention must move: each input read once, each result written once.

Every function returns bytes through device memory for numbers of `itemsize` bytes; rotations are fp32.
"""

from __future__ import annotations

from rooftile.cost.io import Traffic
from rooftile.exact.spec import Problem

# sin and cos of the angles are fp32
_ANGLE = 4


def norm(rows: int, size: int, itemsize: int, *, added: bool = False, weights: int = 1) -> Traffic:
    """A norm of (rows, size). `added` reads a residual too and writes the sum; `weights` vectors of `size` are read."""
    row = rows * size * itemsize
    return Traffic((2 if added else 1) * row + weights * size * itemsize, (2 if added else 1) * row)


def gate(rows: int, size: int, itemsize: int) -> Traffic:
    """act(a) * b of (rows, 2 size), written as (rows, size)."""
    row = rows * size * itemsize
    return Traffic(2 * row, row)


def rotate(tokens: int, heads: int, dim: int, itemsize: int) -> Traffic:
    """Rotary embedding of (tokens, heads, dim): sin and cos of dim / 2 angles per token are read."""
    row = tokens * heads * dim * itemsize
    return Traffic(row + tokens * dim * _ANGLE, row)


def cache_write(tokens: int, kv_heads: int, dim: int, itemsize: int, *, rotated: bool = False) -> Traffic:
    """Keys and values of new tokens into their slots, the keys rotated on the way or not."""
    line = tokens * kv_heads * dim * itemsize
    return Traffic(2 * line + (tokens * dim * _ANGLE if rotated else 0), 2 * line)


def copy(nbytes: int) -> Traffic:
    """A copy of a number of bytes."""
    return Traffic(nbytes, nbytes)


def decode(problem: Problem, *, kv_itemsize: int | None = None, scale_itemsize: int = 0) -> Traffic:
    """Attention of few queries to a cache: q and all keys and values are read, o is written.

    Args:
        problem: the queries and the cached tokens.
        kv_itemsize: bytes of a number in the cache; by default the bytes of the problem's dtype.
        scale_itemsize: bytes of the scale that each key and each value of a head has in FP8.
    """
    spec, sizes = problem.spec, problem.sizes
    itemsize = spec.dtype.itemsize
    cached = sum(S for _, S in sizes.sequences) * sizes.Hk
    rows = sum(T for T, _ in sizes.sequences) * sizes.H
    numbers = (spec.dim + spec.dim_v) * (kv_itemsize or itemsize) + 2 * scale_itemsize
    return Traffic(cached * numbers + rows * spec.dim * itemsize, rows * spec.dim_v * itemsize)


def quantise(problem: Problem, *, keys_for_mean: int = 0) -> Traffic:
    """Quantising q, k and v to 8 bits; `keys_for_mean` keys per sequence are read once before, for their mean."""
    spec, sizes = problem.spec, problem.sizes
    queries = sum(T for T, _ in sizes.sequences) * sizes.H * spec.dim
    keys = sum(S for _, S in sizes.sequences) * sizes.Hk
    numbers = queries + keys * (spec.dim + spec.dim_v)
    before = len(sizes.sequences) * keys_for_mean * sizes.Hk * spec.dim
    return Traffic((numbers + before) * spec.dtype.itemsize, numbers)
