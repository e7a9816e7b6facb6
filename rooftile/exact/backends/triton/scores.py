"""From the products of a tile of queries and keys to its scores, and dropout: shared by forward and backward.

Scores are in units of log2, so that an exponential is one multiply-add and one instruction. For fp32, and with a bias, they stay
natural: a row's lse, rounded once more in another unit, would cost as many bits as its magnitude has, and a bias of the smallest
number of its dtype would become -inf. Positions come as broadcastable tensors, one
along each axis of the tile, so the same code serves a tile and its transpose.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from rooftile.exact.backends.device.listed import seen_bits
from rooftile.exact.backends.device.visibility import MaskNumbers, visible
from rooftile.numerics import softmax

LOG2E, LN2 = tl.constexpr(softmax.LOG2E), tl.constexpr(softmax.LN2)


class OptionNumbers(NamedTuple):
    """The numbers of a call's options."""

    scale: tl.tensor
    softcap: tl.tensor
    mask: MaskNumbers
    threshold: tl.tensor  # dropout's
    keep_scale: tl.tensor


class OptionTensors(NamedTuple):
    """The tensors of a call's options."""

    bias_ptr: tl.tensor
    bias_strides: tl.tuple
    alibi_ptr: tl.tensor
    alibi_strides: tl.tuple
    sinks_ptr: tl.tensor
    seed_ptr: tl.tensor


class BackwardArguments(NamedTuple):
    """A backward's arguments, all but its outputs."""

    tensors: tl.tuple  # q, k, v, do, and the words and rests of rows
    strides: tl.tuple  # (batch, row, head) for q, k, v and do
    sizes: tl.tuple  # B, H, T, S and padded T; packed: T and S are totals
    offsets: tl.tuple  # cu_q and cu_k of packed sequences
    numbers: OptionNumbers
    options: OptionTensors


class Scoring(NamedTuple):
    """How products become scores and weights in a head of a sequence: the same for all tiles of a walk."""

    numbers: OptionNumbers
    T: tl.tensor
    S: tl.tensor
    offset: tl.tensor  # query 0 on the axis of keys
    factor: tl.tensor  # what scores are multiplied by in an exponential
    bias_ptr: tl.tensor  # the head's first
    bias_stride_t: tl.tensor
    bias_stride_s: tl.tensor
    slope: tl.tensor  # ALiBi's
    distance: tl.tensor  # and its distance from query 0 to key 0
    seed: tl.tensor  # dropout's
    b: tl.tensor  # and the batch row, head, query and key of its first random number
    h: tl.tensor
    first_t: tl.tensor
    first_j: tl.tensor


@triton.jit
def seed_of(options, SPEC: tl.constexpr):
    """Loads dropout's seed, if there is dropout."""
    seed = 0
    if SPEC.DROPOUT:
        seed = tl.load(options.seed_ptr)
    return seed


@triton.jit
def scoring_of(T, S, numbers, options, seed, b, row_0, h, SPEC: tl.constexpr):
    """Returns the scoring of head h of sequence b, whose first query is row_0."""
    bias_stride_b, bias_stride_h, bias_stride_t, bias_stride_s = options.bias_strides
    first = row_0 * bias_stride_t if SPEC.PACKED else b.to(tl.int64) * bias_stride_b
    bias_ptr = options.bias_ptr + first + h.to(tl.int64) * bias_stride_h
    slope = 0.0
    if SPEC.ALIBI:
        slope = tl.load(options.alibi_ptr + b * options.alibi_strides[0] + h * options.alibi_strides[1]).to(tl.float32)
    factor = numbers.scale * LOG2E if SPEC.FOLD else 1.0
    b, h, first_t, first_j, distance = place_in_whole(options.seed_ptr, b, h, S - T, SPEC.PLACED)
    return Scoring(
        numbers, T, S, S - T, factor, bias_ptr, bias_stride_t, bias_stride_s, slope, distance, seed, b, h, first_t, first_j
    )


@triton.jit
def place_in_whole(seed_ptr, b, h, offset, PLACED: tl.constexpr):
    """Returns batch row, head, query and key at which head h of sequence b begins, and the distance of query 0 from key 0.

    They count in the larger problem that the call is a part of (see `rooftile.exact.places`), or in the call itself.
    """
    if PLACED:
        place = seed_ptr + 1 + 4 * b
        first_t = tl.load(place + 2).to(tl.int32)
        first_j = tl.load(place + 3).to(tl.int32)
        return tl.load(place).to(tl.int32), h + tl.load(place + 1).to(tl.int32), first_t, first_j, first_t - first_j
    return b, h, 0, 0, offset


@triton.jit
def load_rows(tile, there, column, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Loads a tile of rows, with zeros in columns past DIM and, if MASKED, in rows that are not there."""
    if MASKED:
        return tl.load(tile, mask=there[:, None] & (column < DIM)[None, :], other=0.0)
    if column.shape[0] > DIM:
        return tl.load(tile, mask=(column < DIM)[None, :], other=0.0)
    return tl.load(tile)


@triton.jit
def score(x, t, j, scoring, SPEC: tl.constexpr):
    """Turns products of queries t and keys j into scores without a mask; returns also the tanh of a softcap, for its derivative."""
    UNIT: tl.constexpr = 1.0 if SPEC.NATURAL else LOG2E
    cap = x
    if SPEC.SOFTCAP:
        cap = scaled_tanh(x, scoring.numbers.scale, scoring.numbers.softcap)
        x = cap * (scoring.numbers.softcap * UNIT)
    elif not SPEC.FOLD:
        x = x * (scoring.numbers.scale * UNIT)
    x = add_bias(
        x, t, j, scoring.T, scoring.S, scoring.distance, scoring.bias_ptr, scoring.bias_stride_t,
        scoring.bias_stride_s, scoring.slope, SPEC.BIAS, SPEC.ALIBI, UNIT,
    )  # fmt: skip
    return x, cap


@triton.jit
def seen(t, j, n, scoring, blocks, SPEC: tl.constexpr, BLOCK_S: tl.constexpr):
    """Says whether query t sees key j, in tile number n of a walk over keys."""
    sees = visible(t + scoring.offset, j, scoring.S, scoring.numbers.mask, SPEC)
    if SPEC.BITS:
        place = n // (SPEC.LIST_S // BLOCK_S)
        sees = sees & seen_bits(blocks.bits, place, blocks.part, t, j, scoring.S, SPEC)
    return sees


@triton.jit
def exponent(x, reference, factor, NATURAL: tl.constexpr):
    """x - reference in log2: x times factor and the reference in log2, or both natural."""
    if NATURAL:
        return (x - reference) * LOG2E
    return x * factor - reference


@triton.jit
def exponential(x, reference, factor, NATURAL: tl.constexpr):
    """exp(x - reference)."""
    return tl.exp2(exponent(x, reference, factor, NATURAL))


@triton.jit
def scaled_tanh(x, scale, softcap):
    """tanh(scale x / softcap), by one exponential that saturates at both ends."""
    return 1 - 2 / (tl.exp2(x * (2 * LOG2E * scale / softcap)) + 1)


@triton.jit
def add_bias(
    x, t, j, T, S, distance, bias_ptr, bias_stride_t, bias_stride_s, slope,
    BIAS: tl.constexpr, ALIBI: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Scores with bias and ALiBi added; t and j are a query's and a key's index, `distance` is the distance of query 0 from key 0."""
    if BIAS:
        there = (t < T) & (j < S)
        x += tl.load(bias_ptr + t * bias_stride_t + j * bias_stride_s, mask=there, other=0.0).to(tl.float32) * UNIT
    if ALIBI:
        x -= tl.abs(t + distance - j).to(tl.float32) * (slope * UNIT)
    return x


@triton.jit
def dropout_mask(seed, threshold, b, h, t, j):
    """Returns which weights dropout keeps, by Philox4x32-10 on the counter (column, row, head, batch), keyed by the seed."""
    zero = (t * 0 + j * 0).to(tl.uint32)
    bits, _, _, _ = tl.philox(
        seed, zero + j.to(tl.uint32), zero + t.to(tl.uint32), zero + h.to(tl.uint32), zero + b.to(tl.uint32)
    )
    return bits >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def kept(t, j, scoring):
    """Returns which weights of queries t and keys j dropout keeps."""
    return dropout_mask(scoring.seed, scoring.numbers.threshold, scoring.b, scoring.h, t + scoring.first_t, j + scoring.first_j)


@triton.jit
def drop(x, t, j, scoring):
    """Sets the weights that dropout takes to 0, and scales the rest."""
    keep = kept(t, j, scoring)
    return tl.where(keep, x * scoring.numbers.keep_scale, 0.0)


@triton.jit
def zero_non_finite(x):
    """x with 0 for each NaN and infinity."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def nan_if_non_finite(x, axis: tl.constexpr):
    """NaN where x holds a NaN or an infinity anywhere along an axis, else 0."""
    bad = tl.where(tl.abs(x.to(tl.float32)) < float("inf"), 0, 1)
    return tl.where(tl.max(bad, axis) > 0, float("nan"), 0.0)
