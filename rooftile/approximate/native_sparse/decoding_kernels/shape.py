"""The configuration of the decode kernels, and how the rows of a group of heads are merged."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rooftile.runtime.dependent_launch import overlaps

# programs of a launch: about four to a multiprocessor
PROGRAMS = 512
# compressed keys of a step, unless more begin in a block, and the most
KEYS, MOST_KEYS = 64, 256
MOST_SPLITS = 32
# bytes of a group's queries and outputs that shared memory has room for, beside the keys and values
LARGEST_BYTES = 32768


class DecodingShape(NamedTuple):
    """The compile-time configuration."""

    GROUP: int
    ROWS: int  # heads of a group, padded to what a matrix product takes
    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    SIZE: int  # tokens of a page
    PAGE_ROWS: int  # compressed keys of a page
    LENGTH: int
    STRIDE: int
    BLOCK: int
    COUNT: int
    FIRST: int
    LOCAL: int
    WINDOW: int
    KEYS: int  # compressed keys of a step
    RATIO: int  # strides of a block
    PADDED: int  # the same, padded to a power of two
    NEW: int  # blocks of a step
    MOST: int  # blocks that the choice keeps: a power of two
    TOKENS: int  # tokens of a step of the other branches: a power of two that divides BLOCK
    SPLITS: int  # programs that share the compressed keys of a sequence and a key head
    EACH: int  # steps of a program of the other branches
    CHOSEN: int  # programs that share the chosen blocks
    NEAR: int  # programs that share the window
    PRECISION: str
    PDL: bool  # whether a kernel begins beside the end of the one in front of it

    @property
    def options(self) -> dict[str, bool]:
        """Further arguments of a launch."""
        return {"launch_pdl": True} if self.PDL else {}


@triton.jit
def add_step(acc, m, l, x, v, SHAPE: tl.constexpr):
    """One step of an online softmax over scores x in log2: acc, m, l, the weights, and what they are relative to."""
    m_new = tl.maximum(m, tl.max(x, 1))
    # a row that has met no key yet: -inf - -inf is nan
    reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(x - reference[:, None])
    alpha = tl.exp2(m - reference)
    l = l * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=SHAPE.PRECISION)
    return acc, m_new, l, p, reference


@triton.jit
def store_part(acc_ptr, top_ptr, total_ptr, acc, m, l, place, there, SHAPE: tl.constexpr):
    """Stores a program's part of each row: its unnormalised output, largest score and sum."""
    dv = tl.arange(0, SHAPE.BLOCK_DV)
    tl.store(top_ptr + place, m, mask=there)
    tl.store(total_ptr + place, l, mask=there)
    tl.store(acc_ptr + place[:, None] * SHAPE.DV + dv[None, :], acc, mask=there[:, None] & (dv < SHAPE.DV)[None, :])


def parts_of(shape: DecodingShape) -> int:
    """How many parts a row has in all branches."""
    return shape.SPLITS + shape.CHOSEN + shape.NEAR


def refusal(q: Tensor, Hk: int, dim_v: int, sizes: dict[str, Any]) -> str | None:
    """Why the kernels do not run such a call, or None."""
    ratio = sizes["block_size"] // sizes["stride"]
    if q.dtype.itemsize == 8:
        return f"{q.dtype}; has float32, bfloat16, float16"
    if max(q.shape[2], dim_v) > 256:
        return f"head dims {q.shape[2]}, {dim_v}; has up to 256"
    if ratio > MOST_KEYS:
        return f"blocks of {ratio} strides; has up to {MOST_KEYS}"
    if sizes["block_size"] & -sizes["block_size"] < 16:
        return f"blocks of {sizes['block_size']} tokens; has multiples of 16"
    most = LARGEST_BYTES // ((padded(q.shape[2]) + padded(dim_v)) * q.dtype.itemsize)
    if most < padded(q.shape[1] // Hk):
        return f"{q.shape[1] // Hk} query heads to a key head, of dims {q.shape[2]}, {dim_v}, {q.dtype}; has up to {most}"
    return None


def padded(n: int) -> int:
    """The rows or columns of a matrix product that has n of them."""
    return max(int(triton.next_power_of_2(n)), 16)


def shape_of(q: Tensor, Hk: int, dim_v: int, size: int, *, window: int, **sizes: Any) -> DecodingShape:
    """The configuration of a call with queries (B, H, D)."""
    (B, H, D), block_size, stride, length = q.shape, sizes["block_size"], sizes["stride"], sizes["length"]
    ratio = block_size // stride
    aligned = triton.next_power_of_2(ratio)
    keys = max(KEYS, aligned)
    tokens = min(block_size & -block_size, 64)
    groups = max(B * Hk, 1)
    chosen, near = sizes["count"] * (block_size // tokens), -(-(window - 1) // tokens) + 1
    # powers of two, so that batches of many sizes share what was compiled
    each = _power_of_two(groups * (chosen + near) // PROGRAMS, 4)
    splits = _power_of_two(PROGRAMS // groups, MOST_SPLITS)
    rows, block_d, block_dv, block_c = (padded(x) for x in (H // Hk, D, dim_v, sizes["count"]))
    return DecodingShape(
        H // Hk, rows, D, dim_v, block_d, block_dv, size, size // stride, length, stride, block_size, sizes["count"],
        sizes["first"], sizes["local"], window, keys, ratio, aligned, keys // aligned, block_c, tokens, splits, each,
        -(-chosen // each), -(-near // each), "ieee" if q.dtype.itemsize == 4 else "tf32", overlaps(q.device)["PDL"],
    )  # fmt: skip


def _power_of_two(n: int, most: int) -> int:
    """The largest power of two that is at most n and at most `most`; 1 if there is none."""
    return min(1 << (max(n, 1).bit_length() - 1), most)
