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

from rooftile.exact.backends.device.listed import List, first_of_listed, seen_bits
from rooftile.exact.backends.device.row_stats import pack_lse_delta, unpack_lse_delta
from rooftile.exact.backends.device.visibility import Mask, first_key, last_key, visible
from rooftile.exact.backends.triton.call import Call, constants_of
from rooftile.exact.backends.triton.far_rows import is_far, sum_far_rows
from rooftile.exact.backends.triton.schedule import dense_tile, packed_tile
from rooftile.exact.backends.triton.scores import LOG2E, add_bias, dropout_mask, exponent, scaled_tanh, zero_non_finite
from rooftile.exact.backends.triton.tiles import Tile
from rooftile.exact.spec import Spec
from rooftile.runtime.launch import Kernel

# keys per step of the NaN fallback: few, since it is rare and must not cost the main loop registers
NAN_SAFE_S = tl.constexpr(16)


# fmt: off
@triton.jit
def _walk(
    dq, q, do, lse, rest, delta,                                # the sum, this tile's rows
    low, high, low_tiles, tiles,                                # the keys to visit
    k_ptr, v_ptr, k_stride_s, v_stride_s, mask, t, T, S, offset, b, h, factor, scale, softcap,
    bias_ptr, bias_stride_t, bias_stride_s, slope, seed, dropout, blocks,
    SPEC: tl.constexpr, BLOCK_S: tl.constexpr, MASKED: tl.constexpr, NAN_SAFE: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Walks `tiles` tiles of keys: `low_tiles` of them from key `low` on, the others from key `high` on; or along a list."""
    UNIT: tl.constexpr = 1.0 if SPEC.NATURAL else LOG2E
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    k_offsets = s[:, None] * k_stride_s + d[None, :]
    v_offsets = s[:, None] * v_stride_s + dv[None, :]
    for n in tl.range(0, tiles, num_stages=STAGES):
        if SPEC.BLOCKS:
            j_0 = first_of_listed(n, blocks.entries, S, SPEC.LIST_S, BLOCK_S, 1)
        else:
            j_0 = tl.where(n < low_tiles, low + n * BLOCK_S, high + (n - low_tiles) * BLOCK_S)
        # int64: position times stride passes 2**31 in a long context
        k_tile = k_ptr + tl.cast(j_0, tl.int64) * k_stride_s + k_offsets
        v_tile = v_ptr + tl.cast(j_0, tl.int64) * v_stride_s + v_offsets
        j = j_0 + s
        if MASKED:
            k = tl.load(k_tile, mask=(j < S)[:, None] & (d < SPEC.D)[None, :], other=0.0)
            v = tl.load(v_tile, mask=(j < S)[:, None] & (dv < SPEC.DV)[None, :], other=0.0)
        else:
            k = tl.load(k_tile, mask=(d < SPEC.D)[None, :], other=0.0)
            v = tl.load(v_tile, mask=(dv < SPEC.DV)[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=SPEC.PRECISION)  # (BLOCK_T, BLOCK_S)
        if SPEC.SOFTCAP:
            cap = scaled_tanh(x, scale, softcap)
            x = cap * (softcap * UNIT)
        elif not SPEC.FOLD:
            x = x * (scale * UNIT)
        x = add_bias(
            x, t[:, None], j[None, :], T, S, offset, bias_ptr, bias_stride_t, bias_stride_s, slope, SPEC.BIAS, SPEC.ALIBI, UNIT
        )
        e = exponent(x, lse[:, None], factor, SPEC.NATURAL)
        p = tl.exp2(e - rest[:, None] if SPEC.NATURAL or NAN_SAFE else e)
        if MASKED:
            sees = visible(t[:, None] + offset, j[None, :], S, mask, SPEC)
            if SPEC.BITS:
                place = n // (SPEC.LIST_S // BLOCK_S)
                sees = sees & seen_bits(blocks.bits, place, blocks.part, t[:, None], j[None, :], S, SPEC)
            p = tl.where(sees, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=SPEC.PRECISION)
        if SPEC.DROPOUT:
            dp = tl.where(dropout_mask(seed, dropout[0], b, h, t[:, None], j[None, :]), dp * dropout[1], 0.0)
        # fp16 ends at 65,504: the scale comes in before the rounding rather than after the sum
        ds = (p * scale if SPEC.FP16 else p) * (dp - delta[:, None])
        if SPEC.SOFTCAP:
            ds = ds * (1 - cap * cap)
        if NAN_SAFE:
            ds = tl.where(sees, ds, 0.0)
            k = zero_non_finite(k)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=SPEC.PRECISION)
    return dq


# fmt: off
@triton.jit
def dq_tile(
    n,
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, rests_ptr, dq_ptr,  # tensors
    bias_ptr, alibi_ptr, sinks_ptr, seed_ptr, cu_q_ptr, cu_k_ptr, counts_ptr, indices_ptr, bits_ptr,
    q_strides, k_strides, v_strides, bias_strides, alibi_strides, do_strides,
    B, H, T, S, padded_T, tiles, wave,                          # sizes; packed: T and S are totals
    scale, softcap, left, right, prefix, chunk, threshold, keep_scale,
    list_numbers,
    SPEC: tl.constexpr, TILE: tl.constexpr,
):
    # fmt: on
    """Computes tile number n of queries."""
    BLOCK_T: tl.constexpr = TILE.BLOCK_T
    BLOCK_S: tl.constexpr = TILE.BLOCK_S
    STAGES: tl.constexpr = TILE.num_stages
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    q_stride_b, q_stride_t, q_stride_h = q_strides
    k_stride_b, k_stride_s, k_stride_h = k_strides
    v_stride_b, v_stride_s, v_stride_h = v_strides
    bias_stride_b, bias_stride_h, bias_stride_t, bias_stride_s = bias_strides
    alibi_stride_b, alibi_stride_h = alibi_strides
    do_stride_b, do_stride_t, do_stride_h = do_strides
    mask = Mask(left, right, prefix, chunk)
    dropout = (threshold, keep_scale)
    if SPEC.PACKED:
        slot = n // H
        h = n % H
        b, i_t = packed_tile(slot, cu_q_ptr, B, BLOCK_T)
        row_0 = tl.load(cu_q_ptr + b).to(tl.int64)
        key_0 = tl.load(cu_k_ptr + b).to(tl.int64)
        T = (tl.load(cu_q_ptr + b + 1) - row_0).to(tl.int32)
        S = (tl.load(cu_k_ptr + b + 1) - key_0).to(tl.int32)
        # a slot past the end: its queries are nobody's, and nothing is stored
        S = tl.where(i_t * BLOCK_T < T, S, 0)
        q_ptr += row_0 * q_stride_t
        k_ptr += key_0 * k_stride_s
        v_ptr += key_0 * v_stride_s
        do_ptr += row_0 * do_stride_t
        stats_row = h.to(tl.int64) * padded_T + row_0
        bias_ptr += row_0 * bias_stride_t
    else:
        bh, i_t = dense_tile(n, tiles, B * H, wave, SPEC.RIGHT or SPEC.PREFIX)
        b = bh // H
        h = bh % H
        row_0 = b.to(tl.int64) * T
        q_ptr += b.to(tl.int64) * q_stride_b
        k_ptr += b.to(tl.int64) * k_stride_b
        v_ptr += b.to(tl.int64) * v_stride_b
        do_ptr += b.to(tl.int64) * do_stride_b
        stats_row = bh.to(tl.int64) * padded_T
        bias_ptr += b.to(tl.int64) * bias_stride_b
    q_ptr += h.to(tl.int64) * q_stride_h
    do_ptr += h.to(tl.int64) * do_stride_h
    k_ptr += (h // SPEC.GROUP).to(tl.int64) * k_stride_h
    v_ptr += (h // SPEC.GROUP).to(tl.int64) * v_stride_h
    bias_ptr += h.to(tl.int64) * bias_stride_h

    t_0 = i_t * BLOCK_T
    t = t_0 + tl.arange(0, BLOCK_T)
    there = t < T
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    q_tile = q_ptr + t.to(tl.int64)[:, None] * q_stride_t + d[None, :]
    do_tile = do_ptr + t.to(tl.int64)[:, None] * do_stride_t + dv[None, :]
    q = tl.load(q_tile, mask=there[:, None] & (d < SPEC.D)[None, :], other=0.0)
    do = tl.load(do_tile, mask=there[:, None] & (dv < SPEC.DV)[None, :], other=0.0)
    stats_ptr += stats_row
    rests_ptr += stats_row
    lse, delta = unpack_lse_delta(tl.load(stats_ptr + t, mask=there, other=0) if SPEC.PACKED else tl.load(stats_ptr + t))
    true_lse, rest = unpack_lse_delta(tl.load(rests_ptr + t, mask=there, other=0) if SPEC.PACKED else tl.load(rests_ptr + t))

    # the keys that some row sees, [start, stop), and within them those that every row sees
    offset = S - T
    top = t_0 + offset
    bottom = tl.minimum(t_0 + BLOCK_T, T) - 1 + offset
    start = first_key(top, mask, SPEC) // BLOCK_S * BLOCK_S
    stop = last_key(bottom, S, mask, SPEC) + 1
    clear_start = tl.cdiv(first_key(bottom, mask, SPEC), BLOCK_S) * BLOCK_S
    clear_stop = tl.maximum(last_key(top, S, mask, SPEC) + 1, 0) // BLOCK_S * BLOCK_S
    stop = tl.maximum(stop, start)
    clear_start = tl.minimum(clear_start, tl.cdiv(stop, BLOCK_S) * BLOCK_S)
    clear_stop = tl.maximum(clear_stop, clear_start)

    slope = 0.0
    if SPEC.ALIBI:
        slope = tl.load(alibi_ptr + b * alibi_stride_b + h * alibi_stride_h).to(tl.float32)
    seed = 0
    if SPEC.DROPOUT:
        seed = tl.load(seed_ptr)
    factor = scale * LOG2E if SPEC.FOLD else 1.0

    dq = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    # fmt: off
    left_tiles = (clear_start - start) // BLOCK_S
    right_tiles = tl.cdiv(tl.maximum(stop - clear_stop, 0), BLOCK_S)
    clear_tiles = (clear_stop - clear_start) // BLOCK_S
    safe_tiles = tl.cdiv(stop - start, NAN_SAFE_S)
    list_stride_b, list_stride_h, list_per, list_most, list_part = list_numbers
    blocks = List(indices_ptr, bits_ptr, list_part)
    if SPEC.BLOCKS:
        list_row = b.to(tl.int64) * list_stride_b + (h // list_per) * list_stride_h + t_0 // SPEC.LIST_T
        if SPEC.PACKED:
            list_row += tl.load(cu_q_ptr + b).to(tl.int32) // SPEC.LIST_T + b
        # a slot past the end has no list
        count = tl.load(counts_ptr + tl.where(S > 0, list_row, 0))
        listed = tl.where(S > 0, tl.maximum(tl.minimum(count, list_most), 0), 0)
        clear_tiles = 0
        left_tiles = 0
        right_tiles = listed * (SPEC.LIST_S // BLOCK_S)
        safe_tiles = listed * (SPEC.LIST_S // NAN_SAFE_S)
        bits_row = list_row * list_part * (SPEC.LIST_T * (SPEC.LIST_S // 32))
        blocks = List(indices_ptr + list_row * list_most, bits_ptr + bits_row, list_part)
    far = is_far(true_lse, SPEC.FAR)
    if tl.max(tl.where(far, 1, 0), 0) > 0:
        sink = tl.load(sinks_ptr + h).to(tl.float32) if SPEC.SINKS else 0.0
        lost, total = sum_far_rows(
            q, do, true_lse, start, safe_tiles, k_ptr, v_ptr, k_stride_s, v_stride_s, mask, t, T, S, offset, b, h, factor, scale, softcap,
            bias_ptr, bias_stride_t, bias_stride_s, slope, sink, seed, dropout, blocks, SPEC, NAN_SAFE_S)
        delta = tl.where(far, total + rest, delta)
        rest = tl.where(far, lost, 0.0)
        tl.store(stats_ptr + t, pack_lse_delta(lse, delta), mask=there)
        tl.store(rests_ptr + t, pack_lse_delta(true_lse, rest), mask=there)
        tl.debug_barrier()
    # read again: Triton 3.6 cannot compile some head dims where tensors leave a branch inside of a loop over tiles
    lse, delta = unpack_lse_delta(tl.load(stats_ptr + t, mask=there, other=0) if SPEC.PACKED else tl.load(stats_ptr + t))
    true_lse, rest = unpack_lse_delta(tl.load(rests_ptr + t, mask=there, other=0) if SPEC.PACKED else tl.load(rests_ptr + t))
    dq = _walk(
        dq, q, do, lse, rest, delta, clear_start, clear_start, 0, clear_tiles,
        k_ptr, v_ptr, k_stride_s, v_stride_s, mask, t, T, S, offset, b, h, factor, scale, softcap,
        bias_ptr, bias_stride_t, bias_stride_s, slope, seed, dropout, blocks, SPEC, BLOCK_S, False, False, STAGES)
    dq = _walk(
        dq, q, do, lse, rest, delta, start, clear_stop, left_tiles, left_tiles + right_tiles,
        k_ptr, v_ptr, k_stride_s, v_stride_s, mask, t, T, S, offset, b, h, factor, scale, softcap,
        bias_ptr, bias_stride_t, bias_stride_s, slope, seed, dropout, blocks, SPEC, BLOCK_S, True, False, STAGES)
    # a far row is NaN where scores are in log2, whatever the mask
    if SPEC.LEFT or SPEC.RIGHT or SPEC.PREFIX or SPEC.CHUNK or SPEC.BLOCKS or not SPEC.NATURAL:
        if tl.max(tl.where(dq == dq, 0, 1)) > 0:
            dq = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
            dq = _walk(
                dq, q, do, true_lse, rest, delta, start, start, 0, safe_tiles,
                k_ptr, v_ptr, k_stride_s, v_stride_s, mask, t, T, S, offset, b, h, factor, scale, softcap,
                bias_ptr, bias_stride_t, bias_stride_s, slope, seed, dropout, blocks, SPEC, NAN_SAFE_S, True, True, 1)
    # fmt: on
    dq_tile = dq_ptr + (row_0 + t)[:, None] * (H * SPEC.D) + h * SPEC.D + d[None, :]
    tl.store(dq_tile, (dq if SPEC.FP16 else dq * scale).to(dq_ptr.dtype.element_ty), mask=there[:, None] & (d < SPEC.D)[None, :])


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
    dq_tile(
        tl.program_id(0), q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, rests_ptr, dq_ptr, bias_ptr, alibi_ptr, sinks_ptr, seed_ptr,
        cu_q_ptr, cu_k_ptr, counts_ptr, indices_ptr, bits_ptr, q_strides, k_strides, v_strides, bias_strides, alibi_strides, do_strides, B, H, T, S, padded_T, tiles, wave,
        scale, softcap, left, right, prefix, chunk, threshold, keep_scale, list_numbers, SPEC, TILE,
    )  # fmt: skip


_kernel = Kernel(_backward_q)


def plan(call: Call, tile: Tile, do_strides: tuple[int, ...]) -> list[Callable[..., None]]:
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
def _constants(spec: Spec, tile: Tile) -> dict[str, Any]:
    return {"SPEC": constants_of(spec).spec} | tile.constants
