"""The scores of a tile of candidates and events, shared by the walks of a search.

Scores are compared as integers in the order of the scores: fp32 numbers under "exact", and else small integers.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rooftile.exact.backends.triton.scores import load_rows
from rooftile.recommend.target.kernels.pairs import User, user_and_tile

# an event that is no choice, as a pair and as a score
HIDDEN = tl.constexpr(-(2**63))
NO_SCORE = tl.constexpr(-(2**31))
# the places of the lowest finite fp32 number and of infinity in the order of integers
LOWEST = tl.constexpr(-0x7F800000)
INFINITY = tl.constexpr(0x7F800000)


class Shape(NamedTuple):
    """The compile-time configuration: the argument SPEC."""

    KIND: int  # its place in KINDS
    D: int  # features, or words of a hash
    BLOCK_D: int  # features of a product, some of them at a time where all do not fit
    HELD: bool  # a tile of candidates is loaded once, before its walk
    ROWS: int  # candidates per tile
    KEYS: int  # events per tile
    STAGES: int
    KEPT: int  # k, rounded up to a power of two
    PARTS: int  # part p of a history has tiles p, p + PARTS, ...
    ROOM: int  # pairs of a candidate that a part has room for
    SUMMED: bool  # scores are summed over heads
    BIAS: bool
    PRECISION: str
    PTX: bool  # on a GPU, not in the interpreter


class Sources(NamedTuple):
    """The tensors that scores come from, and the numbers of a call."""

    q_ptr: tl.tensor
    keys_ptr: tl.tensor
    bias_ptr: tl.tensor
    q_strides: tl.tuple
    k_strides: tl.tuple
    bias_strides: tl.tuple
    H: tl.tensor  # heads that are summed
    group: tl.tensor  # heads of candidates that share a head of events
    scale: tl.tensor


class Tile(NamedTuple):
    """A program's candidates, of one user and head."""

    user: User
    h: tl.tensor
    rows: tl.tensor  # (ROWS,) among all candidates
    there: tl.tensor  # (ROWS,)
    begins: tl.tensor  # whether there are any


@triton.jit
def ordered(x):
    """Integers in the order of fp32 numbers: zeros are equal, NaN is the largest."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number(order):
    """The fp32 number of an integer that `ordered` gives."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _ones(x):
    """The number of bits that are set, of int32."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def tile_of(slot, cu_q_ptr, cu_ptr, heads, B, ROWS: tl.constexpr):
    """The candidates of a slot, of one head."""
    user, i = user_and_tile(slot // heads, cu_q_ptr, cu_q_ptr, cu_ptr, B, ROWS)
    i = i * ROWS + tl.arange(0, ROWS)
    there = i < user.rows
    return Tile(user, slot % heads, user.row_0 + i.to(tl.int64), there, tl.max(there.to(tl.int32), 0) > 0)


@triton.jit
def held(sources, tile, SPEC: tl.constexpr):
    """The features of a tile of candidates, if a program holds them."""
    if SPEC.HELD:
        d = tl.arange(0, SPEC.BLOCK_D)
        q_ptr = sources.q_ptr + tile.h.to(tl.int64) * sources.q_strides[1]
        q = load_rows(q_ptr + tile.rows[:, None] * sources.q_strides[0] + d[None, :], tile.there, d, SPEC.D, True)
    else:
        q = tile.there
    return q


@triton.jit
def scores(sources, tile, q, j, SPEC: tl.constexpr, MASKED: tl.constexpr):
    """The scores of a tile of candidates and of events j, (ROWS, KEYS) fp32 or int32; MASKED if events may lie past the last."""
    x = tl.zeros((tile.rows.shape[0], j.shape[0]), tl.float32 if SPEC.KIND == 0 else tl.int32)
    if SPEC.SUMMED:
        for h in range(sources.H):
            x = _head_scores(x, sources, tile, q, j, tile.h + h, SPEC, MASKED)
    else:
        x = _head_scores(x, sources, tile, q, j, tile.h, SPEC, MASKED)
    return x


@triton.jit
def _head_scores(x, sources, tile, q, j, h, SPEC: tl.constexpr, MASKED: tl.constexpr):
    """Adds a head's scores, or takes off its differing bits."""
    q_ptr = sources.q_ptr + h.to(tl.int64) * sources.q_strides[1]
    keys_ptr = (
        sources.keys_ptr + tile.user.key_0 * sources.k_strides[0] + (h // sources.group).to(tl.int64) * sources.k_strides[1]
    )
    at = j.to(tl.int64)
    present = j < tile.user.keys
    if SPEC.KIND == 0:
        product = tl.zeros_like(x)
        for d_0 in range(0, SPEC.D, SPEC.BLOCK_D):
            d = d_0 + tl.arange(0, SPEC.BLOCK_D)
            if SPEC.HELD:
                part = q
            else:
                part = load_rows(q_ptr + tile.rows[:, None] * sources.q_strides[0] + d[None, :], tile.there, d, SPEC.D, True)
            # fewer features than a block has, or the last block
            ENDS: tl.constexpr = SPEC.D % SPEC.BLOCK_D != 0
            keys = load_rows(keys_ptr + at[:, None] * sources.k_strides[0] + d[None, :], present, d, SPEC.D, MASKED or ENDS)
            product = tl.dot(part, tl.trans(keys), product, input_precision=SPEC.PRECISION)
        x = x + product * sources.scale if SPEC.SUMMED else product * sources.scale
        if SPEC.BIAS:
            bias_ptr = (
                sources.bias_ptr + (tile.user.key_0 + at) * sources.bias_strides[0] + h.to(tl.int64) * sources.bias_strides[1]
            )
            bias = tl.load(bias_ptr, mask=present, other=0.0) if MASKED else tl.load(bias_ptr)
            x += bias.to(tl.float32)[None, :]
    else:
        for w in range(SPEC.D):
            words = tl.load(q_ptr + tile.rows * sources.q_strides[0] + w, mask=tile.there, other=0)
            keys = tl.load(keys_ptr + at * sources.k_strides[0] + w, mask=present, other=0)
            if SPEC.KIND == 1:
                x -= _ones(words[:, None] ^ keys[None, :])
            else:
                x += (words[:, None] == keys[None, :]).to(tl.int32)
    return x
