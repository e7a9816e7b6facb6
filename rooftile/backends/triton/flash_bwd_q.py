"""FlashAttention-2 backward for queries, portable Triton.

Each program owns one tile of queries and walks their keys as the forward does:

    P   = exp(scale Q K_j^T - L)
    dS  = P (dO V_j^T - D)                    through dropout, mask and softcap
    dQ += dS K_j

Every sum has one owner and one order, so two runs agree bit for bit.

A row that sees a NaN has a NaN in lse or D already. A NaN that a row does not see can only leak through 0 * K; a tile whose
result holds a NaN is computed again with non-finite keys stripped.

Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 2.
"""

from collections.abc import Callable

import triton
import triton.language as tl

from rooftile.backends.device.visibility import first_key, last_key, visible
from rooftile.backends.triton.call import REPAIRERS, Call
from rooftile.backends.triton.row_stats import unpair
from rooftile.backends.triton.schedule import dense_tile, packed_tile
from rooftile.backends.triton.scores import LOG2E, capped, finite, kept, shifted, weight
from rooftile.backends.triton.tiles import Tile
from rooftile.launch import Kernel

# keys a step of the second walk: small, since it is rare and must not cost the first one registers
CAREFUL_S = tl.constexpr(16)


# fmt: off
@triton.jit
def _walk(
    dq, q, do, lse, delta, first, second, turn, count,          # the sum, this tile's rows, the keys to visit
    k_ptr, v_ptr, k_stride_s, v_stride_s, left, right, prefix, chunk, t, T, S, offset, b, h, factor, scale, softcap,
    bias_ptr, bias_stride_t, bias_stride_s, slope, seed, threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, CHUNK: tl.constexpr,
    MASKED: tl.constexpr, CAREFUL: tl.constexpr, FOLD: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
    HALF: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    UNIT: tl.constexpr = 1.0 if NATURAL else LOG2E
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    k_offsets = s[:, None] * k_stride_s + d[None, :]
    v_offsets = s[:, None] * v_stride_s + dv[None, :]
    for n in tl.range(0, count, num_stages=STAGES):
        # `turn` tiles from `first` on, the others from `second` on
        j_0 = tl.where(n < turn, first + n * BLOCK_S, second + (n - turn) * BLOCK_S)
        # int64: position times stride passes 2**31 in a long context
        k_tile = k_ptr + tl.cast(j_0, tl.int64) * k_stride_s + k_offsets
        v_tile = v_ptr + tl.cast(j_0, tl.int64) * v_stride_s + v_offsets
        j = j_0 + s
        if MASKED:
            k = tl.load(k_tile, mask=(j < S)[:, None] & (d < D)[None, :], other=0.0)
            v = tl.load(v_tile, mask=(j < S)[:, None] & (dv < DV)[None, :], other=0.0)
        else:
            k = tl.load(k_tile, mask=(d < D)[None, :], other=0.0)
            v = tl.load(v_tile, mask=(dv < DV)[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_T, BLOCK_S)
        if SOFTCAP:
            cap = capped(x, scale, softcap)
            x = cap * (softcap * UNIT)
        elif not FOLD:
            x = x * (scale * UNIT)
        x = shifted(
            x, t[:, None], j[None, :], T, S, offset, bias_ptr, bias_stride_t, bias_stride_s, slope, BIAS, ALIBI, UNIT
        )
        p = weight(x, lse[:, None], factor, NATURAL)
        if MASKED:
            sees = visible(t[:, None] + offset, j[None, :], S, left, right, prefix, chunk, LEFT, RIGHT, PREFIX, CHUNK)
            p = tl.where(sees, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            dp = tl.where(kept(seed, threshold, b, h, t[:, None], j[None, :]), dp * keep_scale, 0.0)
        # fp16 ends at 65,504: the scale comes in before the rounding rather than after the sum
        ds = (p * scale if HALF else p) * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * (1 - cap * cap)
        if CAREFUL:
            ds = tl.where(sees, ds, 0.0)
            k = finite(k)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


# fmt: off
@triton.jit
def _tile(
    n,
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dq_ptr,             # tensors
    bias_ptr, alibi_ptr, sinks_ptr, seed_ptr, cu_q_ptr, cu_k_ptr,
    q_stride_b, q_stride_t, q_stride_h,                         # strides, one line a tensor
    k_stride_b, k_stride_s, k_stride_h,
    v_stride_b, v_stride_s, v_stride_h,
    bias_stride_b, bias_stride_h, bias_stride_t, bias_stride_s,
    alibi_stride_b, alibi_stride_h,
    do_stride_b, do_stride_t, do_stride_h,
    B, H, T, S, padded_T, tiles, wave,                          # sizes; packed: T and S are totals
    scale, softcap, left, right, prefix, chunk, threshold, keep_scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PACKED: tl.constexpr,           # the spec
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, CHUNK: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    NATURAL: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,   # the tile
    STAGES: tl.constexpr,
):
    # fmt: on
    """Tile number n of queries."""
    if PACKED:
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
        stats_ptr += h.to(tl.int64) * padded_T + row_0
        bias_ptr += row_0 * bias_stride_t
    else:
        bh, i_t = dense_tile(n, tiles, B * H, wave, RIGHT or PREFIX)
        b = bh // H
        h = bh % H
        row_0 = b.to(tl.int64) * T
        q_ptr += b.to(tl.int64) * q_stride_b
        k_ptr += b.to(tl.int64) * k_stride_b
        v_ptr += b.to(tl.int64) * v_stride_b
        do_ptr += b.to(tl.int64) * do_stride_b
        stats_ptr += bh.to(tl.int64) * padded_T
        bias_ptr += b.to(tl.int64) * bias_stride_b
    q_ptr += h.to(tl.int64) * q_stride_h
    do_ptr += h.to(tl.int64) * do_stride_h
    k_ptr += (h // GROUP).to(tl.int64) * k_stride_h
    v_ptr += (h // GROUP).to(tl.int64) * v_stride_h
    bias_ptr += h.to(tl.int64) * bias_stride_h

    t_0 = i_t * BLOCK_T
    t = t_0 + tl.arange(0, BLOCK_T)
    there = t < T
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_tile = q_ptr + t.to(tl.int64)[:, None] * q_stride_t + d[None, :]
    do_tile = do_ptr + t.to(tl.int64)[:, None] * do_stride_t + dv[None, :]
    q = tl.load(q_tile, mask=there[:, None] & (d < D)[None, :], other=0.0)
    do = tl.load(do_tile, mask=there[:, None] & (dv < DV)[None, :], other=0.0)
    lse, delta = unpair(tl.load(stats_ptr + t, mask=there, other=0) if PACKED else tl.load(stats_ptr + t))

    # the keys that some row sees, [start, stop), and within them those that every row sees
    offset = S - T
    top = t_0 + offset
    bottom = tl.minimum(t_0 + BLOCK_T, T) - 1 + offset
    start = first_key(top, left, chunk, LEFT, CHUNK) // BLOCK_S * BLOCK_S
    stop = last_key(bottom, S, right, prefix, chunk, RIGHT, PREFIX, CHUNK) + 1
    clear_start = tl.cdiv(first_key(bottom, left, chunk, LEFT, CHUNK), BLOCK_S) * BLOCK_S
    clear_stop = tl.maximum(last_key(top, S, right, prefix, chunk, RIGHT, PREFIX, CHUNK) + 1, 0) // BLOCK_S * BLOCK_S
    stop = tl.maximum(stop, start)
    clear_start = tl.minimum(clear_start, tl.cdiv(stop, BLOCK_S) * BLOCK_S)
    clear_stop = tl.maximum(clear_stop, clear_start)

    slope = 0.0
    if ALIBI:
        slope = tl.load(alibi_ptr + b * alibi_stride_b + h * alibi_stride_h).to(tl.float32)
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    factor = scale * LOG2E if FOLD else 1.0

    dq = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    # fmt: off
    left_tiles = (clear_start - start) // BLOCK_S
    right_tiles = tl.cdiv(tl.maximum(stop - clear_stop, 0), BLOCK_S)
    dq = _walk(
        dq, q, do, lse, delta, clear_start, clear_start, 0, (clear_stop - clear_start) // BLOCK_S,
        k_ptr, v_ptr, k_stride_s, v_stride_s, left, right, prefix, chunk, t, T, S, offset,
        b, h, factor, scale, softcap, bias_ptr, bias_stride_t, bias_stride_s, slope, seed, threshold, keep_scale,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_S, LEFT, RIGHT, PREFIX, CHUNK, False, False, FOLD, SOFTCAP, BIAS, ALIBI, DROPOUT, NATURAL, PRECISION, HALF, STAGES)
    dq = _walk(
        dq, q, do, lse, delta, start, clear_stop, left_tiles, left_tiles + right_tiles,
        k_ptr, v_ptr, k_stride_s, v_stride_s, left, right, prefix, chunk, t, T, S, offset,
        b, h, factor, scale, softcap, bias_ptr, bias_stride_t, bias_stride_s, slope, seed, threshold, keep_scale,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_S, LEFT, RIGHT, PREFIX, CHUNK, True, False, FOLD, SOFTCAP, BIAS, ALIBI, DROPOUT, NATURAL, PRECISION, HALF, STAGES)
    if LEFT or RIGHT or PREFIX or CHUNK:
        if tl.max(tl.where(dq == dq, 0, 1)) > 0:
            dq = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
            dq = _walk(
                dq, q, do, lse, delta, start, start, 0, tl.cdiv(stop - start, CAREFUL_S),
                k_ptr, v_ptr, k_stride_s, v_stride_s, left, right, prefix, chunk, t, T, S, offset,
                b, h, factor, scale, softcap, bias_ptr, bias_stride_t, bias_stride_s, slope, seed, threshold, keep_scale,
                D, DV, BLOCK_D, BLOCK_DV, CAREFUL_S, LEFT, RIGHT, PREFIX, CHUNK, True, True, FOLD, SOFTCAP, BIAS, ALIBI, DROPOUT, NATURAL, PRECISION, HALF, 1)
    # fmt: on
    dq_tile = dq_ptr + (row_0 + t)[:, None] * (H * D) + h * D + d[None, :]
    tl.store(dq_tile, (dq if HALF else dq * scale).to(dq_ptr.dtype.element_ty), mask=there[:, None] & (d < D)[None, :])


# fmt: off
@triton.jit(do_not_specialize=["B", "H", "T", "S", "tiles", "wave", "left", "right", "prefix", "chunk", "threshold", "total"])
def _backward_q(
    lost_ptr,                                                   # REPAIR: whether to
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dq_ptr,             # tensors
    bias_ptr, alibi_ptr, sinks_ptr, seed_ptr, cu_q_ptr, cu_k_ptr,
    q_stride_b, q_stride_t, q_stride_h,                         # strides, one line a tensor
    k_stride_b, k_stride_s, k_stride_h,
    v_stride_b, v_stride_s, v_stride_h,
    bias_stride_b, bias_stride_h, bias_stride_t, bias_stride_s,
    alibi_stride_b, alibi_stride_h,
    do_stride_b, do_stride_t, do_stride_h,
    total,                                                      # REPAIR: how many tiles there are
    B, H, T, S, padded_T, tiles, wave,                          # sizes; packed: T and S are totals
    scale, softcap, left, right, prefix, chunk, threshold, keep_scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PACKED: tl.constexpr,           # the spec
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, CHUNK: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    NATURAL: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,   # the tile
    STAGES: tl.constexpr,
    REPAIR: tl.constexpr,
):
    # fmt: on
    if REPAIR:
        # everything once more, where another backend's gradients lost what a mask should hide; else nothing
        stop = tl.where(tl.load(lost_ptr) != 0, total, 0)
        for n in range(tl.program_id(0), stop, tl.num_programs(0)):
            _tile(
                n, q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dq_ptr, bias_ptr, alibi_ptr, sinks_ptr, seed_ptr, cu_q_ptr, cu_k_ptr,
                q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
                bias_stride_b, bias_stride_h, bias_stride_t, bias_stride_s, alibi_stride_b, alibi_stride_h, do_stride_b, do_stride_t,
                do_stride_h, B, H, T, S, padded_T, tiles, wave, scale, softcap, left, right, prefix, chunk, threshold, keep_scale,
                GROUP, D, DV, PACKED, LEFT, RIGHT, PREFIX, CHUNK, FOLD, SOFTCAP, BIAS, ALIBI, DROPOUT, NATURAL, PRECISION, HALF,
                BLOCK_D, BLOCK_DV, BLOCK_T, BLOCK_S, STAGES,
            )  # fmt: skip
    else:
        _tile(
            tl.program_id(0), q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dq_ptr, bias_ptr, alibi_ptr, sinks_ptr, seed_ptr,
            cu_q_ptr, cu_k_ptr,
            q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
            bias_stride_b, bias_stride_h, bias_stride_t, bias_stride_s, alibi_stride_b, alibi_stride_h, do_stride_b, do_stride_t,
            do_stride_h, B, H, T, S, padded_T, tiles, wave, scale, softcap, left, right, prefix, chunk, threshold, keep_scale,
            GROUP, D, DV, PACKED, LEFT, RIGHT, PREFIX, CHUNK, FOLD, SOFTCAP, BIAS, ALIBI, DROPOUT, NATURAL, PRECISION, HALF,
            BLOCK_D, BLOCK_DV, BLOCK_T, BLOCK_S, STAGES,
        )  # fmt: skip


_start_backward = Kernel(_backward_q)


def launchers(call: Call, tile: Tile, do_strides: tuple[int, ...], *, repair: bool) -> list[Callable[..., None]]:
    """What fills dq, given lost, q, k, v, do, stats, dq and the options.

    repair: only where `lost`, one int32, is not zero when the kernel runs; else it may be any tensor.
    """
    programs, tiles = call.programs(call.T, tile.BLOCK_T, call.H)
    if not programs:
        return []
    numbers = (
        *call.strides, *do_strides, programs, call.B, call.H, call.T, call.S, call.padded_T, tiles, call.wave, *call.numbers,
    )  # fmt: skip
    constants = call.constants | {"HALF": call.half, "REPAIR": repair} | tile.constants
    grid = (min(programs, REPAIRERS) if repair else programs, 1, 1)
    return [_start_backward.bound(grid, numbers, constants)]
