"""FlashAttention-2 backward for keys and values, portable Triton.

Each program owns one tile of keys and values of one key head and walks the queries that see some of them, for each query
head of its group in turn. P is recomputed from lse, nothing of size T x S is ever stored. Tiles are held transposed:

    P^T  = exp(scale K Q_i^T - L_i)           softcap, bias, ALiBi, mask as in the forward
    dV  += P^T dO_i                           P after dropout
    dP^T = V dO_i^T                           through dropout
    dS^T = P^T (dP^T - D_i)                   and the derivative of the softcap
    dK  += dS^T Q_i

dQ is left to `flash_bwd_q`, so every sum has one owner and one order and two runs agree bit for bit. Adding dQ up here with
atomics would save two of the seven products a tile; tried on an H200 in 2026-11, it was slower all the same.

Wide heads are walked twice, once for dV and once for dK: two accumulators of 256 columns do not fit in the registers, and
the eighth product was cheaper than spilling or halving the tile (tried on an H200 in 2026-11).

A product with a weight of 0 is not harmless when the other factor is NaN. A row that sees a NaN has one in lse or D already,
so non-finite queries and gradients can simply be set aside, but only where there are some: a tile whose result holds a NaN
is computed again with non-finite values set aside, as in the forward. So is a tile that meets far rows (see `device.row_stats`).

Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 2.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import triton
import triton.language as tl

from rooftile.exact.backends.device.listed import List, ListPointers, first_of_listed, seen_bits
from rooftile.exact.backends.device.row_stats import unpack_lse_delta
from rooftile.exact.backends.device.visibility import MaskNumbers, first_position, last_position, visible
from rooftile.exact.backends.triton.call import TritonCall, constants_of
from rooftile.exact.backends.triton.schedule import first_of_head, first_of_sequence, place_of
from rooftile.exact.backends.triton.scores import (
    BackwardArguments,
    OptionNumbers,
    OptionTensors,
    exponent,
    kept,
    load_rows,
    nan_if_non_finite,
    score,
    scoring_of,
    seed_of,
    zero_non_finite,
)
from rooftile.exact.backends.triton.tiles import Walk
from rooftile.exact.spec import Spec
from rooftile.runtime.launch import Kernel

# queries per step of the NaN fallback: few, since it is rare and must not cost the main loop registers
NAN_SAFE_T = tl.constexpr(16)


# fmt: off
@triton.jit
def _walk(
    dk, dv, k, v, j,                                            # the sums, the keys and values
    low, high, low_tiles, tiles,                                # the queries to visit
    rows, scoring, blocks,
    SPEC: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
    BLOCK_T: tl.constexpr, MASKED: tl.constexpr, NAN_SAFE: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Walks `tiles` tiles of queries: `low_tiles` of them from query `low` on, the others from query `high` on."""
    # packed rows past the end are another sequence's, and a listed block may reach beyond the rows that are padded
    BOUNDED: tl.constexpr = SPEC.PACKED or SPEC.BLOCKS
    q_ptr, do_ptr, stats_ptr, rests_ptr, q_stride_t, do_stride_t = rows
    T, S = scoring.T, scoring.S
    row = tl.arange(0, BLOCK_T)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv_ = tl.arange(0, SPEC.BLOCK_DV)
    q_offsets = row[:, None] * q_stride_t + d[None, :]
    do_offsets = row[:, None] * do_stride_t + dv_[None, :]
    for n in tl.range(0, tiles, num_stages=STAGES):
        if SPEC.BLOCKS:
            t_0 = first_of_listed(n, blocks.entries, T, SPEC.LIST_T, BLOCK_T, 2)
        else:
            t_0 = tl.where(n < low_tiles, low + n * BLOCK_T, high + (n - low_tiles) * BLOCK_T)
        t = t_0 + row
        there = t < T
        # int64: position times stride passes 2**31 in a long context
        q_tile = q_ptr + tl.cast(t_0, tl.int64) * q_stride_t + q_offsets
        do_tile = do_ptr + tl.cast(t_0, tl.int64) * do_stride_t + do_offsets
        q = load_rows(q_tile, there, d, SPEC.D, MASKED)
        # dense rows past the end weigh nothing; packed ones are another sequence's
        lse, delta = unpack_lse_delta(tl.load(stats_ptr + t, mask=there, other=0) if BOUNDED else tl.load(stats_ptr + t))
        if SPEC.NATURAL or NAN_SAFE:
            lse, rest = unpack_lse_delta(tl.load(rests_ptr + t, mask=there, other=0) if BOUNDED else tl.load(rests_ptr + t))
        if NAN_SAFE:
            q = zero_non_finite(q)
        x = tl.dot(k, tl.trans(q), input_precision=SPEC.PRECISION)  # (BLOCK_S, BLOCK_T)
        x, cap = score(x, t[None, :], j[:, None], scoring, SPEC)
        e = exponent(x, lse[None, :], scoring.factor, SPEC.NATURAL)
        p = tl.exp2(e - rest[None, :] if SPEC.NATURAL or NAN_SAFE else e)
        if MASKED:
            sees = visible(t[None, :] + scoring.offset, j[:, None], S, scoring.numbers.mask, SPEC)
            if BOUNDED:
                sees = sees & there[None, :]
            if SPEC.BITS:
                # the place of these keys in the list of the block of queries
                place = tl.load(blocks.entries + n // (SPEC.LIST_T // BLOCK_T) * 2 + 1)
                bits = blocks.bits + (t_0 // SPEC.LIST_T).to(tl.int64) * blocks.part * (SPEC.LIST_T * (SPEC.LIST_S // 32))
                sees = sees & seen_bits(bits, place, blocks.part, t[None, :], j[:, None], S, SPEC)
            p = tl.where(sees, p, 0.0)
        do = load_rows(do_tile, there, dv_, SPEC.DV, MASKED)
        if SPEC.DROPOUT:
            keep = kept(t[None, :], j[:, None], scoring)
        if WANT_DV:
            kept_p = tl.where(keep, p * scoring.numbers.keep_scale, 0.0) if SPEC.DROPOUT else p
            values = do
            if NAN_SAFE:
                kept_p = tl.where(sees, kept_p + nan_if_non_finite(do, 1)[None, :], 0.0)
                values = zero_non_finite(do)
            dv = tl.dot(kept_p.to(do.dtype), values, dv, input_precision=SPEC.PRECISION)
        if WANT_DK:
            dp = tl.dot(v, tl.trans(do), input_precision=SPEC.PRECISION)
            if SPEC.DROPOUT:
                dp = tl.where(keep, dp * scoring.numbers.keep_scale, 0.0)
            # fp16 ends at 65,504: the scale comes in before the rounding rather than after the sum
            ds = (p * scoring.numbers.scale if SPEC.FP16 else p) * (dp - delta[None, :])
            if SPEC.SOFTCAP:
                ds = ds * (1 - cap * cap)
            if NAN_SAFE:
                ds = tl.where(sees, ds, 0.0)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=SPEC.PRECISION)
    return dk, dv


@triton.jit
def _rows_of(problem, b, row_0, SPEC: tl.constexpr):
    """Points to a sequence's rows in query head 0: q, do, their words and rests."""
    q_ptr, _, _, do_ptr, stats_ptr, rests_ptr = problem.tensors
    _, H, _, _, padded_T = problem.sizes
    first = row_0 if SPEC.PACKED else b.to(tl.int64) * H * padded_T
    q_ptr = first_of_sequence(q_ptr, problem.strides[0], b, row_0, SPEC.PACKED)
    do_ptr = first_of_sequence(do_ptr, problem.strides[3], b, row_0, SPEC.PACKED)
    return q_ptr, do_ptr, stats_ptr + first, rests_ptr + first


@triton.jit
def _rows_of_head(rows, problem, h):
    """Points to the rows of head h, and returns the row strides of q and do."""
    q_ptr, do_ptr, stats_ptr, rests_ptr = rows
    q_strides, do_strides = problem.strides[0], problem.strides[3]
    h = h.to(tl.int64)
    first = h * problem.sizes[4]
    return q_ptr + h * q_strides[2], do_ptr + h * do_strides[2], stats_ptr + first, rests_ptr + first, q_strides[1], do_strides[1]


@triton.jit
def _list_of_keys(lists, b, h, j_0, row_0, key_0, T, SPEC: tl.constexpr):
    """Finds the list of the block that key j_0 of a query head lies in, and how many blocks of queries are in it.

    A slot past the end has no list.
    """
    stride_b, stride_h, per, _, part, keys_stride_b, keys_stride_h, keys_most = lists.numbers
    row_slot = tl.cast(0, tl.int64)
    key_slot = tl.cast(j_0 // SPEC.LIST_S, tl.int64)
    if SPEC.PACKED:
        row_slot = row_0 // SPEC.LIST_T + b
        key_slot += key_0 // SPEC.LIST_S + b
    row = b.to(tl.int64) * keys_stride_b + (h // per) * keys_stride_h + key_slot
    count = tl.where(T > 0, tl.load(lists.counts_ptr + tl.where(T > 0, row, 0)), 0)
    bits_row = b.to(tl.int64) * stride_b + (h // per) * stride_h + row_slot
    bits_ptr = lists.bits_ptr + bits_row * part * (SPEC.LIST_T * (SPEC.LIST_S // 32))
    return List(lists.entries_ptr + row * keys_most * 2, bits_ptr, part), count


@triton.jit
def dkdv_tile(n, dk_ptr, dv_ptr, problem, lists, tiles, wave, SPEC: tl.constexpr, WALK: tl.constexpr):
    """Computes tile number n of keys and values; `tiles` are the tiles of a key head, and `lists` the lists of keys."""
    WANT_DK: tl.constexpr = WALK.wants_dk
    WANT_DV: tl.constexpr = WALK.wants_dv
    BLOCK_T: tl.constexpr = WALK.tile.BLOCK_T
    BLOCK_S: tl.constexpr = WALK.tile.BLOCK_S
    STAGES: tl.constexpr = WALK.tile.num_stages
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    B, H, T, S, _ = problem.sizes
    cu_q_ptr, cu_k_ptr = problem.offsets
    mask = problem.numbers.mask
    HK = H // SPEC.GROUP
    b, hk, i_s, _, row_0, key_0, T, S = place_of(
        n, cu_k_ptr, cu_q_ptr, cu_k_ptr, B, HK, T, S, tiles, wave, BLOCK_S, False, SPEC.PACKED
    )
    if SPEC.PACKED:
        # a slot past the end: its keys are nobody's, and nothing is stored
        T = tl.where(i_s * BLOCK_S < S, T, 0)
    sequence = _rows_of(problem, b, row_0, SPEC)

    j_0 = i_s * BLOCK_S
    j = j_0 + tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    dv_ = tl.arange(0, BLOCK_DV)
    k_ptr = first_of_head(problem.tensors[1], problem.strides[1], b, key_0, hk, SPEC.PACKED)
    v_ptr = first_of_head(problem.tensors[2], problem.strides[2], b, key_0, hk, SPEC.PACKED)
    k = load_rows(k_ptr + j.to(tl.int64)[:, None] * problem.strides[1][1] + d[None, :], j < S, d, SPEC.D, True)
    v = k
    dk = 0.0
    dv = 0.0
    if WANT_DK:
        v = load_rows(v_ptr + j.to(tl.int64)[:, None] * problem.strides[2][1] + dv_[None, :], j < S, dv_, SPEC.DV, True)
        dk = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    if WANT_DV:
        dv = tl.zeros((BLOCK_S, BLOCK_DV), tl.float32)
    # a far row is NaN where scores are in log2, whatever the mask
    MAY_BE_NAN: tl.constexpr = SPEC.LEFT or SPEC.RIGHT or SPEC.PREFIX or SPEC.CHUNK or SPEC.BLOCKS or not SPEC.NATURAL

    # the queries that see some of these keys, [start, stop), and within them those that see all
    offset = S - T
    j_1 = tl.minimum(j_0 + BLOCK_S, S) - 1
    start = first_position(j_0, mask, SPEC) - offset
    stop = tl.minimum(last_position(j_1, mask, SPEC) - offset + 1, T)
    clear_start = first_position(j_1, mask, SPEC) - offset
    clear_stop = last_position(j_0, mask, SPEC) - offset + 1
    start = tl.maximum(start, 0) // BLOCK_T * BLOCK_T
    stop = tl.maximum(stop, start)
    clear_start = tl.minimum(tl.cdiv(tl.maximum(clear_start, 0), BLOCK_T), tl.cdiv(stop, BLOCK_T)) * BLOCK_T
    clear_stop = tl.minimum(tl.maximum(clear_stop, 0), T) // BLOCK_T * BLOCK_T
    # keys past the end would weigh something: a ragged tile of keys is masked throughout
    clear_stop = tl.where(j_0 + BLOCK_S > S, clear_start, tl.maximum(clear_stop, clear_start))

    early_tiles = (clear_start - start) // BLOCK_T
    clear_tiles = (clear_stop - clear_start) // BLOCK_T
    masked_tiles = early_tiles + tl.cdiv(tl.maximum(stop - clear_stop, 0), BLOCK_T)
    safe_tiles = tl.cdiv(stop - start, NAN_SAFE_T)
    blocks = List(lists.entries_ptr, lists.bits_ptr, lists.numbers[4])
    seed = seed_of(problem.options, SPEC)

    # fmt: off
    for g in range(0, SPEC.GROUP):
        h = hk * SPEC.GROUP + g
        if SPEC.BLOCKS:
            blocks, count = _list_of_keys(lists, b, h, j_0, row_0, key_0, T, SPEC)
            clear_tiles = 0
            early_tiles = 0
            masked_tiles = count * (SPEC.LIST_T // BLOCK_T)
        rows = _rows_of_head(sequence, problem, h)
        scoring = scoring_of(T, S, problem.numbers, problem.options, seed, b, row_0, h, SPEC)
        dk, dv = _walk(
            dk, dv, k, v, j, clear_start, clear_start, 0, clear_tiles,
            rows, scoring, blocks, SPEC, WANT_DK, WANT_DV, BLOCK_T, False, False, STAGES)
        dk, dv = _walk(
            dk, dv, k, v, j, start, clear_stop, early_tiles, masked_tiles,
            rows, scoring, blocks, SPEC, WANT_DK, WANT_DV, BLOCK_T, True, False, STAGES)
    if MAY_BE_NAN:
        has_nan = 0
        if WANT_DK:
            has_nan += tl.max(tl.where(dk == dk, 0, 1))
        if WANT_DV:
            has_nan += tl.max(tl.where(dv == dv, 0, 1))
        if has_nan > 0:
            # the sums are NaN in places: start again from zeros of their shape
            dk = tl.zeros((BLOCK_S, BLOCK_D), tl.float32) if WANT_DK else 0.0
            dv = tl.zeros((BLOCK_S, BLOCK_DV), tl.float32) if WANT_DV else 0.0
            for g in range(0, SPEC.GROUP):
                h = hk * SPEC.GROUP + g
                if SPEC.BLOCKS:
                    blocks, count = _list_of_keys(lists, b, h, j_0, row_0, key_0, T, SPEC)
                    safe_tiles = count * (SPEC.LIST_T // NAN_SAFE_T)
                rows = _rows_of_head(sequence, problem, h)
                scoring = scoring_of(T, S, problem.numbers, problem.options, seed, b, row_0, h, SPEC)
                dk, dv = _walk(
                    dk, dv, k, v, j, start, start, 0, safe_tiles,
                    rows, scoring, blocks, SPEC, WANT_DK, WANT_DV, NAN_SAFE_T, True, True, 1)
    # fmt: on

    if WANT_DK:
        dk_tile = dk_ptr + (key_0 + j)[:, None] * (HK * SPEC.D) + hk * SPEC.D + d[None, :]
        dk = dk if SPEC.FP16 else dk * problem.numbers.scale
        tl.store(dk_tile, dk.to(dk_ptr.dtype.element_ty), mask=(j < S)[:, None] & (d < SPEC.D)[None, :])
    if WANT_DV:
        dv_tile = dv_ptr + (key_0 + j)[:, None] * (HK * SPEC.DV) + hk * SPEC.DV + dv_[None, :]
        tl.store(dv_tile, dv.to(dv_ptr.dtype.element_ty), mask=(j < S)[:, None] & (dv_ < SPEC.DV)[None, :])


# fmt: off
@triton.jit(do_not_specialize=["B", "H", "T", "S", "tiles", "wave", "left", "right", "prefix", "chunk", "threshold"])
def _backward_kv(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, rests_ptr, dk_ptr, dv_ptr,  # tensors
    bias_ptr, alibi_ptr, sinks_ptr, seed_ptr, cu_q_ptr, cu_k_ptr, counts_ptr, entries_ptr, bits_ptr,
    q_strides, k_strides, v_strides, bias_strides, alibi_strides, do_strides,
    B, H, T, S, padded_T, tiles, wave,                          # sizes; packed: T and S are totals
    scale, softcap, left, right, prefix, chunk, threshold, keep_scale,
    list_numbers,
    SPEC: tl.constexpr, WALK: tl.constexpr,
):
    # fmt: on
    problem = BackwardArguments(
        (q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, rests_ptr), (q_strides, k_strides, v_strides, do_strides), (B, H, T, S, padded_T),
        (cu_q_ptr, cu_k_ptr), OptionNumbers(scale, softcap, MaskNumbers(left, right, prefix, chunk), threshold, keep_scale),
        OptionTensors(bias_ptr, bias_strides, alibi_ptr, alibi_strides, sinks_ptr, seed_ptr),
    )  # fmt: skip
    lists = ListPointers(counts_ptr, entries_ptr, bits_ptr, list_numbers)
    dkdv_tile(tl.program_id(0), dk_ptr, dv_ptr, problem, lists, tiles, wave, SPEC, WALK)


_kernel = Kernel(_backward_kv)


def plan(call: TritonCall, walks: tuple[Walk, ...], do_strides: tuple[int, ...]) -> list[Callable[..., None]]:
    """The launches that fill dk and dv, given q, k, v, do, the words and rests of rows, dk, dv and the options."""
    found = []
    for walk in walks:
        programs, tiles = call.programs(call.S, walk.tile.BLOCK_S, call.Hk)
        numbers = (
            *call.strides, do_strides, call.B, call.H, call.T, call.S, call.padded_T, tiles,
            call.wave // call.spec.group, *call.numbers, call.key_list_numbers,
        )  # fmt: skip
        if programs:
            found.append(_kernel.bound((programs, 1, 1), numbers, _constants(call.spec, walk)))
    return found


@cache
def _constants(spec: Spec, walk: Walk) -> dict[str, Any]:
    return {"SPEC": constants_of(spec).spec, "WALK": walk, "num_warps": walk.tile.num_warps}
