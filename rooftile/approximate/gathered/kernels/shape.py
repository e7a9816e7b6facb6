"""The rows and keys of a program, the pairs that it sees and their weights, and the configuration of the kernels."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.approximate.gathered.lists import RowLists
from rooftile.runtime.devices import capability
from rooftile.runtime.launch import Kernel

# a place after all others
HIDDEN = tl.constexpr(2**30)


class GatheredShape(NamedTuple):
    """The compile-time configuration."""

    ROWS: int  # rows of a tile of queries
    KEYS: int  # rows of a tile of keys
    GROUP: int  # heads of queries per head of keys
    GROUP_V: int  # and per head of values
    ROUNDS: int  # rounds that N_ij counts; 1: no pair is weighed
    BEFORE: int  # groups before its own that a query reads: 0 or 1
    KIND: str  # "lists", "chunks" or "window"
    CAUSAL: bool
    OWN: bool  # a row that sees nothing gets its own value in the forward
    REPAIR: bool  # only tiles whose results held a NaN, with non-finite numbers set aside
    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    PRECISION: str


@triton.jit
def parts_of(tiles, H, B):
    """The tile of a program, its slice (a round of a sequence's head), round, sequence and head."""
    part = tl.program_id(0) // tiles
    # neighbours in the grid are neighbours in a list, which share keys in the cache
    return tl.program_id(0) % tiles, part.to(tl.int64), part // (H * B), part // H % B, part % H


@triton.jit
def holds_nan(x):
    """1 if a NaN is in x, else 0."""
    return tl.max(tl.where(x == x, 0, 1))


@triton.jit
def tile_of_group(group, n, groups, width, length, BLOCK: tl.constexpr, SHAPE: tl.constexpr):
    """The n-th tile of a list's positions from a group on, and which are there. The last chunk is before the first one."""
    per = (width + BLOCK - 1) // BLOCK
    group += n // per
    if SHAPE.KIND == "chunks":
        group = tl.where(group < 0, group + groups, group)
        group = tl.where(group >= groups, group - groups, group)
    at = group * width + n % per * BLOCK + tl.arange(0, BLOCK)
    return at, (group >= 0) & (at < tl.minimum((group + 1) * width, length))


@triton.jit
def load_places(list_ptr, at, there, length):
    """The places at positions of a list, and which are there: lists on a GPU are not checked, and nothing outside is read."""
    place = tl.load(list_ptr + at, mask=there, other=-1)
    there = there & (place >= 0) & (place < length)
    return tl.where(there, place, 0), there


@triton.jit
def seen_pairs(i, j, i_at, j_at, low, SHAPE: tl.constexpr):
    """The pairs that are seen, by places (a key that is not there is HIDDEN), positions in a list, and the lowest one in a window."""
    if SHAPE.KIND == "window":
        return (j < i) & (j_at < i_at) & (j_at >= low)
    if SHAPE.KIND == "lists":
        if SHAPE.CAUSAL:
            return j <= i
        return (j < HIDDEN) & (i < HIDDEN)
    if SHAPE.CAUSAL:
        return j < i
    return (j != i) & (j < HIDDEN)


@triton.jit
def weights(i_at, i_there, j_at, j_there, marks_ptr, lows_ptr, stride, groups, SHAPE: tl.constexpr):
    """1 / N_ij: a pair's share in each of the rounds that see it, this one among them."""
    ROUNDS: tl.constexpr = SHAPE.ROUNDS
    # with the shape of a tile of pairs
    count = tl.where(i_there & j_there, 1, 1)
    for n in tl.static_range(1, ROUNDS):
        of_i = tl.load(marks_ptr + n * stride + i_at, mask=i_there, other=0)
        of_j = tl.load(marks_ptr + n * stride + j_at, mask=j_there, other=0)
        if SHAPE.KIND == "window":
            low = tl.load(lows_ptr + n * stride + i_at, mask=i_there, other=0)
            count += ((of_j < of_i) & (of_j >= low)).to(tl.int32)
        else:
            back = of_i - of_j
            # the first chunk sees the last one
            count += ((back == 0) | (back == 1) | (back == 1 - groups)).to(tl.int32)
    if SHAPE.ROUNDS == 2:
        return tl.where(count == 2, 0.5, 1.0)
    return 1.0 / count.to(tl.float32)


@triton.jit
def store_lse(lse_ptr, place, m, l, mask):
    """Stores m + log2 l, and what its rounding lost: weights computed from one number would not add up to one at a large offset."""
    lse = m + tl.log2(l)
    tl.store(lse_ptr + 2 * place, lse, mask=mask)
    tl.store(lse_ptr + 2 * place + 1, tl.where(m == float("-inf"), 0.0, tl.log2(l) - (lse - m)), mask=mask)


@triton.jit
def load_lse(lse_ptr, place, mask):
    """lse and its rest, in log2; rows that see nothing, or are not there, get +inf, and so weights of 0."""
    lse = tl.load(lse_ptr + 2 * place, mask=mask, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse), tl.load(lse_ptr + 2 * place + 1, mask=mask, other=0.0)


def shape_of(q: Tensor, k: Tensor, v: Tensor, lists: RowLists, phase: str, hopper: bool | None = None) -> GatheredShape:
    """The configuration of a call, phase "forward", "dq" or "dkdv"; hopper: None asks the device of q."""
    padded_d, padded_v = (max(16, padded(x.shape[-1])) for x in (q, v))
    hopper = q.is_cuda and _is_hopper(q.get_device()) if hopper is None else hopper
    most = _most(q.dtype, max(padded_d, padded_v), phase, hopper)
    rows, keys = (min(size, max(16, padded(width))) for size, width in zip(most, (lists.width, lists.key_width), strict=True))
    rounds = 1 if lists.marks is None else lists.marks.shape[1]
    own = lists.kind != "lists" and lists.rows.shape[0] == 1
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    return GatheredShape(
        rows, keys, q.shape[2] // k.shape[2], q.shape[2] // v.shape[2], rounds, lists.before, lists.kind, lists.causal, own,
        False, q.shape[-1], v.shape[-1], padded_d, padded_v, precision,
    )  # fmt: skip


def _most(dtype: torch.dtype, dim: int, phase: str, hopper: bool) -> tuple[int, int]:
    """The largest tiles that the registers hold, queries times keys: from what compiles without spilling in the loop."""
    if dtype == torch.float32:
        return 32, 32
    if hopper and dim > 64:
        return {"forward": (128, 64), "dq": (128, 32), "dkdv": (64, 64)}[phase]
    return 64, 64


@cache
def _is_hopper(index: int) -> bool:
    return capability(torch.device("cuda", index)) >= (9, 0)


def padded(size: int) -> int:
    """The power of two from a size on."""
    return 1 << max(size - 1, 0).bit_length()


def launch(kernel: Kernel, programs: int, tensors: tuple[Tensor, ...], numbers: tuple[object, ...], shape: GatheredShape) -> None:
    """Launches a kernel, and again for the tiles that held a NaN; tensors and numbers are its arguments but for their flags.

    Setting NaN aside takes registers that every program would have to hold, so it is a launch of its own.
    """
    flags = torch.empty(programs, dtype=torch.int32, device=tensors[0].device)
    for repair in (False, True):
        kernel((programs, 1, 1), (*tensors, flags, *numbers), _constants(shape._replace(REPAIR=repair)))


@cache
def _constants(shape: GatheredShape) -> dict[str, object]:
    # a launch knows its constants by their identity
    return {"SHAPE": shape, "num_warps": warps_of(shape), "num_stages": 2}


def warps_of(shape: GatheredShape) -> int:
    """Warps of a program: four, and eight where a row's sums are wide and rows are many, or products are no matrix instructions."""
    pairs, wide = shape.ROWS * shape.KEYS, max(shape.BLOCK_D, shape.BLOCK_DV) > 64
    return 8 if (pairs >= 4096 and wide) or (pairs >= 1024 and shape.PRECISION == "ieee") else 4


def strides_of(*tensors: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Strides of sequence, row and head of each."""
    return tuple((x.stride(0), x.stride(1), x.stride(2)) for x in tensors)
