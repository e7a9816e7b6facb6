"""Masks, compression and expansion in one pass over memory each, bit for bit as `rooftile.weights.two_four.definition`.

A thread has whole groups of four neighbours, so that nothing crosses from one thread to another: a tile (rows, 4 G) is split into
four tensors (rows, G), one for each place in a group. Numbers are moved as integers of their size.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.runtime.launch import Kernel
from rooftile.weights.two_four.definition import bits_of
from rooftile.weights.two_four.patterns import BITS, PAIRS, PATTERNS

# rows and columns of a program's tile
ROWS, COLUMNS = 4, 512
# blocks of 4 x 4 of a program
BLOCKS = 128


@triton.jit
def quarters(x):
    """Splits (R, C) into the four places of its groups, (R, C / 4) each."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def joined(a, b, c, d):
    """Puts four places of groups, (R, G) each, together to (R, 4 G)."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], 4 * a.shape[1]))


@triton.jit
def _mask(w_ptr, o_ptr, flag_ptr, stride, N, K: tl.constexpr, INFINITE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Writes the mask of a tile: the two largest |w| of each four. Bits without the sign are integers in the order of |w|.

    NaN's are above infinity's, and raise the flag.
    """
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (n < N)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + (n * stride)[:, None] + k[None, :], mask=there, other=0)
    a, b, c, d = quarters(w & ((1 << (w.dtype.primitive_bitwidth - 1)) - 1))
    lost = (a > INFINITE) | (b > INFINITE) | (c > INFINITE) | (d > INFINITE)
    tl.store(flag_ptr, 1, mask=tl.max(lost.to(tl.int32)) > 0)
    ab, ac, ad = (a >= b).to(tl.int8), (a >= c).to(tl.int8), (a >= d).to(tl.int8)
    bc, bd, cd = (b >= c).to(tl.int8), (b >= d).to(tl.int8), (c >= d).to(tl.int8)
    # how many of the others are kept before each
    kept = joined(
        (3 - ab - ac - ad < 2).to(tl.int8), (2 + ab - bc - bd < 2).to(tl.int8), (1 + ac + bc - cd < 2).to(tl.int8),
        (ad + bd + cd < 2).to(tl.int8),
    )  # fmt: skip
    tl.store(o_ptr + (n * K)[:, None] + k[None, :], kept, mask=there)


@triton.jit
def _row_of_block(w_ptr, place, there):
    """The sizes of four neighbours, (BLOCKS,) each."""
    w = tl.load(w_ptr + place[:, None] + tl.arange(0, 4)[None, :], mask=there[:, None], other=0)
    if w.dtype == tl.uint8:
        # e4m3 in the bits of fp16 is a number 2^8 times too small; chips before Ada know no e4m3
        sizes = ((w & 127).to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        sizes = tl.where((w & 127) == 127, float("nan"), sizes)
    else:
        sizes = tl.abs(w.to(tl.float32))
    even, odd = tl.split(tl.reshape(sizes, (w.shape[0], 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _pairs(row, PAIRS: tl.constexpr):
    return (
        row[PAIRS[0]] + row[PAIRS[1]], row[PAIRS[2]] + row[PAIRS[3]], row[PAIRS[4]] + row[PAIRS[5]],
        row[PAIRS[6]] + row[PAIRS[7]], row[PAIRS[8]] + row[PAIRS[9]], row[PAIRS[10]] + row[PAIRS[11]],
    )  # fmt: skip


# fmt: off
@triton.jit
def _transposable_mask(
    w_ptr, o_ptr, flag_ptr, stride, total, K: tl.constexpr, PAIRS: tl.constexpr, PATTERNS: tl.constexpr, BITS: tl.constexpr,
    COUNT: tl.constexpr, BLOCKS: tl.constexpr,
):
    # fmt: on
    """Writes the masks of some blocks of 4 x 4. All 90 sums are taken, and the first of the largest is kept."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    there = block < total
    n, k = block // (K // 4) * 4, block % (K // 4) * 4
    first = _pairs(_row_of_block(w_ptr, n * stride + k, there), PAIRS)
    second = _pairs(_row_of_block(w_ptr, (n + 1) * stride + k, there), PAIRS)
    third = _pairs(_row_of_block(w_ptr, (n + 2) * stride + k, there), PAIRS)
    fourth = _pairs(_row_of_block(w_ptr, (n + 3) * stride + k, there), PAIRS)
    # sizes are not negative, so a sum of all is NaN where one of them is
    every = (first[0] + first[5] + second[0] + second[5]) + (third[0] + third[5] + fourth[0] + fourth[5])
    tl.store(flag_ptr, 1, mask=tl.max((every != every).to(tl.int32)) > 0)
    most = tl.full((BLOCKS,), -1.0, tl.float32)
    found = tl.zeros((BLOCKS,), tl.int32)
    for i in tl.static_range(COUNT):
        sums = (first[PATTERNS[4 * i]] + second[PATTERNS[4 * i + 1]]) + (third[PATTERNS[4 * i + 2]] + fourth[PATTERNS[4 * i + 3]])
        found = tl.where(sums > most, BITS[i], found)
        most = tl.maximum(most, sums)
    column = tl.arange(0, 4)
    for row in tl.static_range(4):
        kept = (found[:, None] >> (4 * row + column)[None, :]) & 1
        tl.store(o_ptr + ((n + row) * K + k)[:, None] + column[None, :], kept.to(tl.int8), mask=there[:, None])


@triton.jit
def _compress(
    w_ptr, mask_ptr, values_ptr, places_ptr, flag_ptr, stride, N, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Writes the values and places of a tile. A group that does not keep two raises the flag."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * COLUMNS
    k = start + tl.arange(0, COLUMNS)
    there = (n < N)[:, None] & (k < K)[None, :]
    a, b, c, d = quarters(tl.load(w_ptr + (n * stride)[:, None] + k[None, :], mask=there, other=0))
    in_a, in_b, in_c, in_d = quarters(tl.load(mask_ptr + (n * K)[:, None] + k[None, :], mask=there, other=0))
    first = tl.where(in_a != 0, a, tl.where(in_b != 0, b, c))
    second = tl.where(in_d != 0, d, tl.where(in_c != 0, c, b))
    half = start // 2 + tl.arange(0, COLUMNS // 2)
    there = (n < N)[:, None] & (half < K // 2)[None, :]
    tl.store(values_ptr + (n * (K // 2))[:, None] + half[None, :], tl.interleave(first, second), mask=there)
    four = tl.where(in_a != 0, 0, tl.where(in_b != 0, 1, 2)) | tl.where(in_d != 0, 12, tl.where(in_c != 0, 8, 4))
    # groups beyond K have no places
    group = start // 4 + tl.arange(0, COLUMNS // 4)
    four = tl.where((group < K // 4)[None, :], four, 0)
    wrong = (in_a + in_b + in_c + in_d != 2) & (n < N)[:, None] & (group < K // 4)[None, :]
    tl.store(flag_ptr, 1, mask=tl.max(wrong.to(tl.int32)) > 0)
    low, high = tl.split(tl.reshape(four, (ROWS, COLUMNS // 8, 2)))
    byte = start // 8 + tl.arange(0, COLUMNS // 8)
    there = (n < N)[:, None] & (byte < (K + 7) // 8)[None, :]
    tl.store(places_ptr + (n * ((K + 7) // 8))[:, None] + byte[None, :], (low | high << 4).to(tl.uint8), mask=there)


@triton.jit
def _dense(values_ptr, places_ptr, o_ptr, N, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Writes a tile with zeros between the values."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * COLUMNS
    half = start // 2 + tl.arange(0, COLUMNS // 2)
    there = (n < N)[:, None] & (half < K // 2)[None, :]
    values = tl.load(values_ptr + (n * (K // 2))[:, None] + half[None, :], mask=there, other=0)
    byte = start // 8 + tl.arange(0, COLUMNS // 8)
    there = (n < N)[:, None] & (byte < (K + 7) // 8)[None, :]
    places = tl.load(places_ptr + (n * ((K + 7) // 8))[:, None] + byte[None, :], mask=there, other=0).to(tl.int32)
    four = tl.interleave(places & 15, places >> 4)
    first, second = tl.split(tl.reshape(values, (ROWS, COLUMNS // 4, 2)))
    zero = tl.zeros_like(first)
    low, high = four & 3, four >> 2
    found = joined(
        tl.where(low == 0, first, zero), tl.where(low == 1, first, tl.where(high == 1, second, zero)),
        tl.where(low == 2, first, tl.where(high == 2, second, zero)), tl.where(high == 3, second, zero),
    )  # fmt: skip
    k = start + tl.arange(0, COLUMNS)
    tl.store(o_ptr + (n * K)[:, None] + k[None, :], found, mask=(n < N)[:, None] & (k < K)[None, :])


_start_mask, _start_transposable = Kernel(_mask), Kernel(_transposable_mask)
_start_compress, _start_dense = Kernel(_compress), Kernel(_dense)


# the bits of infinity, or of the largest number that is not NaN
_INFINITE = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000, torch.float8_e4m3fn: 0x7E}


def mask(w: Tensor, transposable: bool) -> tuple[Tensor, Tensor]:
    """Returns the mask (N, K), bool, and a flag: not 0 where w holds NaN."""
    w = w if w.stride(1) == 1 else w.contiguous()
    N, K = w.shape
    found = torch.empty((N, K), dtype=torch.bool, device=w.device)
    o, flag = found.view(torch.int8), _flag(w)
    if transposable:
        blocks = N * K // 16
        numbers = bits_of(w) if w.element_size() == 1 else w
        _start_transposable((triton.cdiv(blocks, BLOCKS), 1, 1), (numbers, o, flag, w.stride(0), blocks), blocks_of(K))
    else:
        _start_mask(_grid(N, K), (bits_of(w), o, flag, w.stride(0), N), tiles_of(K, _INFINITE[w.dtype]))
    return found, flag


def _flag(w: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=w.device)


def compress(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns values (N, K / 2), places (N, K / 8), and a flag: not 0 where the mask does not keep two of four."""
    w = w if w.stride(1) == 1 else w.contiguous()
    N, K = w.shape
    values = torch.empty((N, K // 2), dtype=w.dtype, device=w.device)
    places = torch.empty((N, -(-K // 8)), dtype=torch.uint8, device=w.device)
    kept, flag = mask.contiguous().view(torch.int8), _flag(w)
    _start_compress(_grid(N, K), (bits_of(w), kept, bits_of(values), places, flag, w.stride(0), N), tiles_of(K))
    return values, places, flag


def dense(values: Tensor, places: Tensor, K: int) -> Tensor:
    """Returns the weight (N, K)."""
    values, places = values.contiguous(), places.contiguous()
    N = values.shape[0]
    o = torch.empty((N, K), dtype=values.dtype, device=values.device)
    _start_dense(_grid(N, K), (bits_of(values), places, bits_of(o), N), tiles_of(K))
    return o


def _grid(N: int, K: int) -> tuple[int, int, int]:
    return triton.cdiv(N, ROWS), triton.cdiv(K, COLUMNS), 1


@cache
def tiles_of(K: int, infinite: int | None = None) -> dict[str, object]:
    """The compile-time arguments of what works on tiles; of masks also the bits of infinity."""
    found = {"K": K, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": 4}
    return found if infinite is None else found | {"INFINITE": infinite}


@cache
def blocks_of(K: int) -> dict[str, object]:
    """The compile-time arguments of the transposable choice."""
    flat = {"PAIRS": tuple(n for pair in PAIRS for n in pair), "PATTERNS": tuple(n for rows in PATTERNS for n in rows)}
    return {"K": K, **flat, "BITS": BITS, "COUNT": len(BITS), "BLOCKS": BLOCKS, "num_warps": 4}
