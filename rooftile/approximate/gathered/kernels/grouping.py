"""The choices of Reformer and Routing: a hash per vector and round without its products in memory, and the best of many scores."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.approximate.gathered.kernels.shape import padded, strides_of
from rooftile.runtime.launch import Kernel

# random vectors and dimensions to a product
VECTORS, DIMS = 64, 32
# exponents that are tried one by one
EXPONENTS = tl.constexpr(6)


@triton.jit(do_not_specialize=["T", "H", "rounds", "half"])
def _hash(
    x_ptr, random_ptr, out_ptr, x_strides, T, H, rounds, half, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The index of the largest of [x R; -x R], (B, T, H, rounds), from random (H, D, rounds, half)."""
    tiles = (T + ROWS - 1) // ROWS
    b, h = tl.program_id(0) // tiles // H, tl.program_id(0) // tiles % H
    t = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    rows = x_ptr + b.to(tl.int64) * x_strides[0] + t.to(tl.int64)[:, None] * x_strides[1] + h.to(tl.int64) * x_strides[2]
    random_ptr += h.to(tl.int64) * D * rounds * half
    for r in range(rounds):
        high = tl.full((ROWS,), float("-inf"), tl.float32)
        low = tl.full((ROWS,), float("-inf"), tl.float32)
        highest = tl.zeros((ROWS,), tl.int32)
        lowest = tl.zeros((ROWS,), tl.int32)
        for n in range(0, half, COLUMNS):
            column = n + tl.arange(0, COLUMNS)
            there = (column < half)[None, :]
            y = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(0, D, BLOCK_D):
                d = start + tl.arange(0, BLOCK_D)
                x = tl.load(rows + d[None, :], mask=(t < T)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
                vectors = random_ptr + (d[:, None] * rounds + r) * half + column[None, :]
                vectors = tl.load(vectors, mask=(d < D)[:, None] & there, other=0.0)
                # three products of 11 bits of both factors have the accuracy of one in fp32
                y = tl.dot(x, vectors, y, input_precision="tf32x3")
            for_high, for_low = tl.where(there, y, float("-inf")), tl.where(there, -y, float("-inf"))
            found, other = tl.max(for_high, 1), tl.max(for_low, 1)
            # ties go to the lower index, which came first
            highest = tl.where(found > high, n + tl.argmax(for_high, 1), highest)
            lowest = tl.where(other > low, n + tl.argmax(for_low, 1), lowest)
            high, low = tl.maximum(high, found), tl.maximum(low, other)
        answer = tl.where(low > high, lowest + half, highest)
        place = ((b.to(tl.int64) * T + t) * H + h) * rounds + r
        tl.store(out_ptr + place, answer, mask=t < T)


@triton.jit(do_not_specialize=["T", "H", "clusters"])
def _score(
    x_ptr, centroid_ptr, score_ptr, x_strides, T, H, clusters, GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The products of layer-normed rows with centroids (H, clusters, D), (B, H, clusters, T) in fp32. WIDE: D, padded."""
    tiles = (T + ROWS - 1) // ROWS
    b, h = tl.program_id(0) // tiles // H, tl.program_id(0) // tiles % H
    t = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    rows = x_ptr + b.to(tl.int64) * x_strides[0] + t.to(tl.int64)[:, None] * x_strides[1]
    rows += (h // GROUP).to(tl.int64) * x_strides[2]
    d = tl.arange(0, WIDE)
    there = (t < T)[:, None]
    whole = tl.load(rows + d[None, :], mask=there & (d < D)[None, :], other=0.0).to(tl.float32)
    mean = tl.sum(whole, 1) / D
    whole = tl.where((d < D)[None, :], whole - mean[:, None], 0.0)
    factor = 1.0 / tl.sqrt_rn(tl.sum(whole * whole, 1) / D + 1e-5)
    for n in range(0, clusters, COLUMNS):
        c = n + tl.arange(0, COLUMNS)
        y = tl.zeros((COLUMNS, ROWS), tl.float32)
        for start in range(0, D, BLOCK_D):
            part = start + tl.arange(0, BLOCK_D)
            x = tl.load(rows + part[None, :], mask=there & (part < D)[None, :], other=0.0).to(tl.float32)
            x = tl.where((part < D)[None, :], (x - mean[:, None]) * factor[:, None], 0.0)
            centroids = centroid_ptr + (h.to(tl.int64) * clusters + c)[:, None] * D + part[None, :]
            centroids = tl.load(centroids, mask=(c < clusters)[:, None] & (part < D)[None, :], other=0.0)
            y = tl.dot(centroids, tl.trans(x), y, input_precision="tf32x3")
        out = score_ptr + ((b.to(tl.int64) * H + h) * clusters + c)[:, None] * T + t[None, :]
        tl.store(out, y, mask=(c < clusters)[:, None] & (t < T)[None, :])


@triton.jit(do_not_specialize=["length", "count"])
def _best(score_ptr, out_ptr, length, count, BLOCK: tl.constexpr):
    """The places of the `count` largest scores of a row, rising; ties go to the lower place, and NaN is the largest."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BLOCK)
    score = tl.load(score_ptr + row * length + t, mask=t < length, other=0.0)
    kept = is_best(score, t, length, count)
    at = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(out_ptr + row * count + at, t, mask=kept & (at < count))


@triton.jit
def is_best(score, t, length, count):
    """Whether each score at places t below `length` is one of the `count` largest; ties go to the lower place."""
    # -0 is 0
    score += 0.0
    bits = tl.where(score == score, score, float("nan")).to(tl.int32, bitcast=True)
    # unsigned numbers in the order of the scores, and 0 past the end
    order = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    order = tl.where(t < length, tl.where(score == score, order, 0xFFFFFFFF), 0).to(tl.uint32)
    # the count-th largest: first its sign and exponent, which it often shares with the largest, or has one lower
    edge = tl.max(order, 0) & 0xFF800000
    reached = tl.sum((order >= edge).to(tl.int32), 0)
    tries = 0
    while (reached < count) & (tries < EXPONENTS):
        edge = (edge - 0x800000).to(tl.uint32)
        reached = tl.sum((order >= edge).to(tl.int32), 0)
        tries += 1
    bit = tl.where(reached < count, 0x80000000, 0x400000).to(tl.uint32)
    bit = tl.where(reached == count, 0, bit).to(tl.uint32)
    edge = tl.where(reached < count, 0, edge).to(tl.uint32)
    # then the other bits, or all of them, from the highest on, until `count` scores are at least as large
    while bit > 0:
        reached = tl.sum((order >= (edge | bit)).to(tl.int32), 0)
        edge = tl.where(reached >= count, edge | bit, edge)
        bit = tl.where(reached == count, 0, bit >> 1).to(tl.uint32)
    above = (order > edge).to(tl.int32)
    tied = ((order == edge) & (t < length)).to(tl.int32)
    return (above > 0) | ((tied > 0) & (tl.cumsum(tied, 0) <= count - tl.sum(above, 0)))


_start_hash, _start_score, _start_best = Kernel(_hash), Kernel(_score), Kernel(_best)


def hashes(x: Tensor, random: Tensor) -> Tensor:
    """Returns hashes (B, T, H, rounds) int32 of x (B, T, H, D), from contiguous random vectors (H, D, rounds, half) in fp32."""
    (B, T, H, D), (rounds, half) = x.shape, random.shape[2:]
    out = torch.empty(B, T, H, rounds, dtype=torch.int32, device=x.device)
    if out.numel():
        constants = _hash_constants(D, half)
        tiles = -(-T // constants["ROWS"])
        _start_hash((tiles * B * H, 1, 1), (x, random, out, *strides_of(x), T, H, rounds, half), constants)
    return out


@cache
def _hash_constants(dim: int, half: int) -> dict[str, int]:
    columns = min(VECTORS, max(padded(half), 16))
    return {"D": dim, "BLOCK_D": min(max(padded(dim), 16), DIMS), "ROWS": 64, "COLUMNS": columns, "num_warps": 4, "num_stages": 1}


def scores(x: Tensor, centroids: Tensor) -> Tensor:
    """Returns the products (B, H, c, T) in fp32 of layer-normed x (B, T, Hk, D) with contiguous centroids (H, c, D) in fp32."""
    (B, T, Hk, D), (H, clusters) = x.shape, centroids.shape[:2]
    out = torch.empty(B, H, clusters, T, dtype=torch.float32, device=x.device)
    if out.numel():
        constants = _score_constants(D, clusters, H // Hk)
        tiles = -(-T // constants["ROWS"])
        _start_score((tiles * B * H, 1, 1), (x, centroids, out, *strides_of(x), T, H, clusters), constants)
    return out


@cache
def _score_constants(dim: int, clusters: int, group: int) -> dict[str, int]:
    wide = max(padded(dim), 16)
    return {
        "GROUP": group, "D": dim, "WIDE": wide, "BLOCK_D": min(wide, DIMS), "ROWS": 64,
        "COLUMNS": min(VECTORS, max(padded(clusters), 16)), "num_warps": 4, "num_stages": 1,
    }  # fmt: skip


def best(score: Tensor, count: int) -> Tensor:
    """Returns the places (..., count) int32 of the largest of contiguous scores (..., T) in fp32."""
    out = torch.empty(*score.shape[:-1], count, dtype=torch.int32, device=score.device)
    if out.numel():
        rows = score.shape[:-1].numel()
        _start_best((rows, 1, 1), (score, out, score.shape[-1], count), _best_constants(padded(score.shape[-1])))
    return out


@cache
def _best_constants(block: int) -> dict[str, int]:
    return {"BLOCK": block, "num_warps": min(max(block // 1024, 1), 16)}
