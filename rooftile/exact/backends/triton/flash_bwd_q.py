"""FlashAttention-2 backward for queries, portable Triton.

Each program owns one tile of queries and walks their keys as the forward does:

    P   = exp(scale Q K_j^T - L)
    dS  = P (dO V_j^T - D)                    through dropout, mask and softcap
    dQ += dS K_j

Every sum has one owner and one order, so two runs agree bit for bit.

A row that sees a NaN has a NaN in lse or D already. A NaN that a row does not see can only leak through 0 * K; a tile whose
result holds a NaN is computed again with non-finite keys stripped. So is a tile with far rows (see `device.row_stats`), after one
walk more for what their lse has lost.

Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 2.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import triton
import triton.language as tl

from rooftile.exact.backends.device.listed import ListPointers, first_of_listed
from rooftile.exact.backends.device.row_stats import pack_lse_delta, unpack_lse_delta
from rooftile.exact.backends.device.visibility import MaskNumbers
from rooftile.exact.backends.triton.call import TritonCall, constants_of
from rooftile.exact.backends.triton.far_rows import is_far, sum_far_rows
from rooftile.exact.backends.triton.schedule import first_of_head, key_tiles, place_of
from rooftile.exact.backends.triton.scores import (
    BackwardArguments,
    OptionNumbers,
    OptionTensors,
    drop,
    exponent,
    load_rows,
    score,
    scoring_of,
    seed_of,
    seen,
    zero_non_finite,
)
from rooftile.exact.backends.triton.tiles import BlockShape
from rooftile.exact.spec import Spec
from rooftile.runtime.launch import Kernel

# keys per step of the NaN fallback: few, since it is rare and must not cost the main loop registers
NAN_SAFE_S = tl.constexpr(16)


# fmt: off
@triton.jit
def _walk(
    dq, q, do, lse, rest, delta, t,                             # the sum, this tile's rows
    low, high, low_tiles, tiles,                                # the keys to visit
    k_ptr, v_ptr, k_stride_s, v_stride_s, scoring, blocks,
    SPEC: tl.constexpr, BLOCK_S: tl.constexpr, MASKED: tl.constexpr, NAN_SAFE: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Walks `tiles` tiles of keys: `low_tiles` of them from key `low` on, the others from key `high` on; or along a list."""
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    k_offsets = s[:, None] * k_stride_s + d[None, :]
    v_offsets = s[:, None] * v_stride_s + dv[None, :]
    for n in tl.range(0, tiles, num_stages=STAGES):
        if SPEC.BLOCKS:
            j_0 = first_of_listed(n, blocks.entries, scoring.S, SPEC.LIST_S, BLOCK_S, 1)
        else:
            j_0 = tl.where(n < low_tiles, low + n * BLOCK_S, high + (n - low_tiles) * BLOCK_S)
        # int64: position times stride passes 2**31 in a long context
        k_tile = k_ptr + tl.cast(j_0, tl.int64) * k_stride_s + k_offsets
        v_tile = v_ptr + tl.cast(j_0, tl.int64) * v_stride_s + v_offsets
        j = j_0 + s
        k = load_rows(k_tile, j < scoring.S, d, SPEC.D, MASKED)
        v = load_rows(v_tile, j < scoring.S, dv, SPEC.DV, MASKED)
        x = tl.dot(q, tl.trans(k), input_precision=SPEC.PRECISION)  # (BLOCK_T, BLOCK_S)
        x, cap = score(x, t[:, None], j[None, :], scoring, SPEC)
        e = exponent(x, lse[:, None], scoring.factor, SPEC.NATURAL)
        p = tl.exp2(e - rest[:, None] if SPEC.NATURAL or NAN_SAFE else e)
        if MASKED:
            sees = seen(t[:, None], j[None, :], n, scoring, blocks, SPEC, BLOCK_S)
            p = tl.where(sees, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=SPEC.PRECISION)
        if SPEC.DROPOUT:
            dp = drop(dp, t[:, None], j[None, :], scoring)
        # fp16 ends at 65,504: the scale comes in before the rounding rather than after the sum
        ds = (p * scoring.numbers.scale if SPEC.FP16 else p) * (dp - delta[:, None])
        if SPEC.SOFTCAP:
            ds = ds * (1 - cap * cap)
        if NAN_SAFE:
            ds = tl.where(sees, ds, 0.0)
            k = zero_non_finite(k)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=SPEC.PRECISION)
    return dq


@triton.jit
def _load_words(stats_ptr, rests_ptr, t, there, PACKED: tl.constexpr):
    """Loads lse and delta of rows, and their true lse and its rest. Another sequence's rows follow packed ones."""
    lse, delta = unpack_lse_delta(tl.load(stats_ptr + t, mask=there, other=0) if PACKED else tl.load(stats_ptr + t))
    true_lse, rest = unpack_lse_delta(tl.load(rests_ptr + t, mask=there, other=0) if PACKED else tl.load(rests_ptr + t))
    return lse, delta, true_lse, rest


@triton.jit
def dq_tile(n, dq_ptr, problem, lists, tiles, wave, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Computes tile number n of queries; `tiles` are the tiles of a head, and `lists` the lists of queries."""
    BLOCK_T: tl.constexpr = TILE.BLOCK_T
    BLOCK_S: tl.constexpr = TILE.BLOCK_S
    STAGES: tl.constexpr = TILE.num_stages
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    PACKED: tl.constexpr = SPEC.PACKED
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, rests_ptr = problem.tensors
    q_strides, k_strides, v_strides, do_strides = problem.strides
    B, H, T, S, padded_T = problem.sizes
    cu_q_ptr, cu_k_ptr = problem.offsets
    b, h, i_t, bh, row_0, key_0, T, S = place_of(
        n, cu_q_ptr, cu_q_ptr, cu_k_ptr, B, H, T, S, tiles, wave, BLOCK_T, SPEC.RIGHT or SPEC.PREFIX, PACKED
    )
    if PACKED:
        # a slot past the end: its queries are nobody's, and nothing is stored
        S = tl.where(i_t * BLOCK_T < T, S, 0)
    q_ptr = first_of_head(q_ptr, q_strides, b, row_0, h, PACKED)
    k_ptr = first_of_head(k_ptr, k_strides, b, key_0, h // SPEC.GROUP, PACKED)
    v_ptr = first_of_head(v_ptr, v_strides, b, key_0, h // SPEC.GROUP, PACKED)
    do_ptr = first_of_head(do_ptr, do_strides, b, row_0, h, PACKED)
    stats_row = bh.to(tl.int64) * padded_T + (row_0 if PACKED else 0)
    stats_ptr += stats_row
    rests_ptr += stats_row
    q_stride_t, k_stride_s, v_stride_s, do_stride_t = q_strides[1], k_strides[1], v_strides[1], do_strides[1]

    t_0 = i_t * BLOCK_T
    t = t_0 + tl.arange(0, BLOCK_T)
    there = t < T
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    q = load_rows(q_ptr + t.to(tl.int64)[:, None] * q_stride_t + d[None, :], there, d, SPEC.D, True)
    do = load_rows(do_ptr + t.to(tl.int64)[:, None] * do_stride_t + dv[None, :], there, dv, SPEC.DV, True)
    lse, delta, true_lse, rest = _load_words(stats_ptr, rests_ptr, t, there, PACKED)
    scoring = scoring_of(T, S, problem.numbers, problem.options, seed_of(problem.options, SPEC), b, row_0, h, SPEC)
    walk = key_tiles(t_0, T, S, scoring.numbers.mask, lists, cu_q_ptr, b, h, SPEC, BLOCK_T, BLOCK_S, NAN_SAFE_S)
    dq = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    far = is_far(true_lse, SPEC.FAR)
    # fmt: off
    if tl.max(tl.where(far, 1, 0), 0) > 0:
        sink = tl.load(problem.options.sinks_ptr + h).to(tl.float32) if SPEC.SINKS else 0.0
        lost, total = sum_far_rows(
            q, do, true_lse, t, walk.start, walk.safe, k_ptr, v_ptr, k_stride_s, v_stride_s, sink, scoring, walk.blocks, SPEC, NAN_SAFE_S)
        delta = tl.where(far, total + rest, delta)
        rest = tl.where(far, lost, 0.0)
        tl.store(stats_ptr + t, pack_lse_delta(lse, delta), mask=there)
        tl.store(rests_ptr + t, pack_lse_delta(true_lse, rest), mask=there)
        tl.debug_barrier()
    # read again: Triton 3.6 cannot compile some head dims where tensors leave a branch inside of a loop over tiles
    lse, delta, true_lse, rest = _load_words(stats_ptr, rests_ptr, t, there, PACKED)
    dq = _walk(
        dq, q, do, lse, rest, delta, t, walk.clear_start, walk.clear_start, 0, walk.clear,
        k_ptr, v_ptr, k_stride_s, v_stride_s, scoring, walk.blocks, SPEC, BLOCK_S, False, False, STAGES)
    dq = _walk(
        dq, q, do, lse, rest, delta, t, walk.start, walk.clear_stop, walk.left, walk.left + walk.right,
        k_ptr, v_ptr, k_stride_s, v_stride_s, scoring, walk.blocks, SPEC, BLOCK_S, True, False, STAGES)
    # a far row is NaN where scores are in log2, whatever the mask
    if SPEC.LEFT or SPEC.RIGHT or SPEC.PREFIX or SPEC.CHUNK or SPEC.BLOCKS or not SPEC.NATURAL:
        if tl.max(tl.where(dq == dq, 0, 1)) > 0:
            dq = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
            dq = _walk(
                dq, q, do, true_lse, rest, delta, t, walk.start, walk.start, 0, walk.safe,
                k_ptr, v_ptr, k_stride_s, v_stride_s, scoring, walk.blocks, SPEC, NAN_SAFE_S, True, True, 1)
    # fmt: on
    dq_tile = dq_ptr + (row_0 + t)[:, None] * (H * SPEC.D) + h * SPEC.D + d[None, :]
    dq = dq if SPEC.FP16 else dq * scoring.numbers.scale
    tl.store(dq_tile, dq.to(dq_ptr.dtype.element_ty), mask=there[:, None] & (d < SPEC.D)[None, :])


# fmt: off
@triton.jit(do_not_specialize=["B", "H", "T", "S", "tiles", "wave", "left", "right", "prefix", "chunk", "threshold"])
def _backward_q(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, rests_ptr, dq_ptr,  # tensors
    bias_ptr, alibi_ptr, sinks_ptr, seed_ptr, cu_q_ptr, cu_k_ptr, counts_ptr, indices_ptr, bits_ptr,
    q_strides, k_strides, v_strides, bias_strides, alibi_strides, do_strides,
    B, H, T, S, padded_T, tiles, wave,                          # sizes; packed: T and S are totals
    scale, softcap, left, right, prefix, chunk, threshold, keep_scale,
    list_numbers,
    SPEC: tl.constexpr, TILE: tl.constexpr,
):
    # fmt: on
    problem = BackwardArguments(
        (q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, rests_ptr), (q_strides, k_strides, v_strides, do_strides), (B, H, T, S, padded_T),
        (cu_q_ptr, cu_k_ptr), OptionNumbers(scale, softcap, MaskNumbers(left, right, prefix, chunk), threshold, keep_scale),
        OptionTensors(bias_ptr, bias_strides, alibi_ptr, alibi_strides, sinks_ptr, seed_ptr),
    )  # fmt: skip
    lists = ListPointers(counts_ptr, indices_ptr, bits_ptr, list_numbers)
    dq_tile(tl.program_id(0), dq_ptr, problem, lists, tiles, wave, SPEC, TILE)


_kernel = Kernel(_backward_q)


def plan(call: TritonCall, tile: BlockShape, do_strides: tuple[int, ...]) -> list[Callable[..., None]]:
    """The launch that fills dq, if there is anything to fill, given q, k, v, do, the words and rests of rows, dq and the options.

    It also fills in the rests of far rows, which the launches for dk and dv read.
    """
    programs, tiles = call.programs(call.T, tile.BLOCK_T, call.H)
    if not programs:
        return []
    numbers = (
        *call.strides, do_strides, call.B, call.H, call.T, call.S, call.padded_T, tiles, call.wave, *call.numbers,
        call.list_numbers,
    )  # fmt: skip
    return [_kernel.bound((programs, 1, 1), numbers, _constants(call.spec, tile))]


@cache
def _constants(spec: Spec, tile: BlockShape) -> dict[str, Any]:
    return {"SPEC": constants_of(spec).spec} | tile.constants
