"""The bytes that attention moves, counted exactly for a stated schedule.

    compulsory   device memory: each visible input read once, each output written once, as with a very large cache
    tiles        FlashAttention-2's schedule through L2: the forward keeps a query tile and loops over the keys
    standard     scores and probabilities written to memory and read back

On a GPU the re-reads of `tiles` mostly hit L2, so device memory sees about `compulsory` and L2 sees `tiles`. Only
visible tiles count, and the last tile of a ragged length counts the rows that it has. lse and delta are fp32 (fp64 for
fp64). Bias, ALiBi slopes, sinks and packed offsets are not counted: a Problem does not know a bias's own axes.

Dao et al., FlashAttention, arXiv:2205.14135; Dao, FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rooftile.cost.flops import check_phase
from rooftile.exact.masks import key_range, query_range
from rooftile.exact.spec import Problem


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes read from and written to one level of memory."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.read * times, self.written * times)


class _Bytes(NamedTuple):
    """The bytes of one row of each kind."""

    q: int  # q, dq, k or dk: D elements
    v: int  # v, dv, o or do: Dv elements
    stat: int  # lse or delta: one number
    wide: int  # a dq that is being summed: D wide numbers


def compulsory(problem: Problem, phase: str = "fwd") -> Traffic:
    """Counts the device-memory bytes that no schedule avoids.

    Forward: reads q, k and v, writes o and lse. Backward: reads q, k, v, o, do and lse, writes and reads delta, the row
    sums of o do, and writes dq, dk and dv. Rows of q that see no key and keys that no row sees are not read; every
    output is written.
    """
    check_phase(phase)
    row, sizes = _rows(problem), problem.sizes
    total = Traffic(0, 0)
    for (T, S), times in Counter(sizes.sequences).items():
        queries, keys = _visible(problem, T, S)
        read = queries * row.q + keys * (row.q + row.v)
        if phase == "fwd":
            one = Traffic(read, T * sizes.H * (row.v + row.stat))
        else:
            read += queries * (2 * row.v + 2 * row.stat)
            one = Traffic(read, T * sizes.H * row.q + S * sizes.Hk * (row.q + row.v) + queries * row.stat)
        total += one * times
    return total


def visible(problem: Problem) -> tuple[int, int]:
    """Counts the rows of q that see a key and the keys that some row sees, over all sequences and heads."""
    each = [_visible(problem, T, S) for T, S in problem.sizes.sequences]
    return sum(queries for queries, _ in each), sum(keys for _, keys in each)


def _visible(problem: Problem, T: int, S: int) -> tuple[int, int]:
    first_key, last_key = key_range(problem.spec.mask, 0, T, T, S)
    first_query, last_query = query_range(problem.spec.mask, 0, S, T, S)
    return (last_query - first_query) * problem.sizes.H, (last_key - first_key) * problem.sizes.Hk


def tiles(problem: Problem, phase: str = "fwd", *, block_t: int = 128, block_s: int = 64) -> Traffic:
    """Counts the bytes through L2 of FlashAttention-2's schedule with tiles of block_t queries and block_s keys.

    Forward: a tile of one head's queries is read, its visible tiles of k and v are read, and o and lse are written.
    Backward: delta is made first (o and do read, delta written). Then a tile of keys is read once and, for each query
    head of its group, the visible tiles of q, do, lse and delta are read and dq is summed in place, wide: read and
    written. dk and dv are written once. dq is cleared first; a half-precision one is rounded from a wide buffer last.
    """
    check_phase(phase)
    row, sizes = _rows(problem), problem.sizes
    total = Traffic(0, 0)
    for (T, S), times in Counter(sizes.sequences).items():
        if phase == "fwd":
            visits = sum(stop - start for start, stop in _key_spans(problem, T, S, block_t, block_s))
            one = Traffic(T * row.q + visits * (row.q + row.v), T * (row.v + row.stat)) * sizes.H
        else:
            visits = sum(stop - start for start, stop in _query_spans(problem, T, S, block_t, block_s)) * sizes.H
            keys, queries = S * sizes.Hk * (row.q + row.v), T * sizes.H
            delta = Traffic(2 * queries * row.v, queries * row.stat)
            summing = Traffic(visits * row.wide, (visits + queries) * row.wide)
            rounding = Traffic(queries * row.wide, queries * row.q) if row.wide != row.q else Traffic(0, 0)
            one = delta + Traffic(keys + visits * (row.q + row.v + 2 * row.stat), keys) + summing + rounding
        total += one * times
    return total


def standard(problem: Problem, phase: str = "fwd") -> Traffic:
    """Counts the device-memory bytes of attention as separate operations: T x S matrices in the inputs' dtype, masked or not.

    Forward: S = q k^T; P = softmax S, the mask applied on the way; o = P v. Backward, with P kept: dv = P^T do;
    dP = do v^T; dS from P and dP; dq = dS k; dk = dS^T q. Each operation reads its inputs once and writes its output.
    """
    check_phase(phase)
    row, sizes, element = _rows(problem), problem.sizes, problem.spec.dtype.itemsize
    total = Traffic(0, 0)
    for (T, S), times in Counter(sizes.sequences).items():
        matrix, q, o = T * S * sizes.H * element, T * sizes.H * row.q, T * sizes.H * row.v
        k, v = S * sizes.Hk * row.q, S * sizes.Hk * row.v
        if phase == "fwd":
            one = Traffic(q + k + matrix + matrix + v, matrix + matrix + o)
        else:
            # dv, dP, dS, dq, dk in turn
            read = (matrix + o) + (o + v) + 2 * matrix + (matrix + k) + (matrix + q)
            one = Traffic(read, v + matrix + matrix + q + k)
        total += one * times
    return total


def standard_peak(problem: Problem, phase: str = "fwd") -> int:
    """Counts the bytes of T x S matrices that standard attention holds at once: S and P; in the backward P, dP and dS."""
    check_phase(phase)
    elements = sum(T * S for T, S in problem.sizes.sequences) * problem.sizes.H
    return elements * problem.spec.dtype.itemsize * (2 if phase == "fwd" else 3)


def flash_peak(problem: Problem, phase: str = "fwd") -> int:
    """Counts the bytes that tiled attention holds beyond inputs and outputs: lse; in the backward also delta and a wide dq."""
    check_phase(phase)
    row, sizes = _rows(problem), problem.sizes
    rows = sum(T for T, _ in sizes.sequences) * sizes.H
    if phase == "fwd":
        return rows * row.stat
    return rows * (2 * row.stat + (row.wide if row.wide != row.q else 0))


def _rows(problem: Problem) -> _Bytes:
    element = problem.spec.dtype.itemsize
    wide = max(element, 4)
    return _Bytes(problem.spec.dim * element, problem.spec.dim_v * element, wide, problem.spec.dim * wide)


def _key_spans(problem: Problem, T: int, S: int, block_t: int, block_s: int) -> Iterator[tuple[int, int]]:
    """Yields, per query tile, the keys [start, stop) of its visible key tiles."""
    for t in range(0, T, block_t):
        start, stop = key_range(problem.spec.mask, t, min(t + block_t, T), T, S)
        if start < stop:
            yield start // block_s * block_s, min(-(-stop // block_s) * block_s, S)


def _query_spans(problem: Problem, T: int, S: int, block_t: int, block_s: int) -> Iterator[tuple[int, int]]:
    """Yields, per key tile, the queries [start, stop) of its visible query tiles."""
    for s in range(0, S, block_s):
        start, stop = query_range(problem.spec.mask, s, min(s + block_s, S), T, S)
        if start < stop:
            yield start // block_t * block_t, min(-(-stop // block_t) * block_t, T)
