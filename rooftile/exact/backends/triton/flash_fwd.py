"""FlashAttention-2 forward, portable Triton.

Each program owns one tile of queries of one head and walks the keys that some of them see:

    X  = scale * Q K_j^T                     softcap, bias, ALiBi; -inf behind the mask
    m' = max(m, rowmax X)
    P  = exp(X - m')
    O  = exp(m - m') O + P V_j
    l  = exp(m - m') l + rowsum P

and writes O / l and lse = m + log l. Exponentials are base 2; log2(e) rides in the scale.

A query sees an interval of keys (`visibility`), so the walk has at most three parts: keys that only some of the tile's
queries see on the left, keys that all see, where no mask is computed, and keys that only some see on the right.

A product with a weight of 0 is not harmless when the value is NaN. A tile whose result holds a NaN is therefore computed
again with the non-finite inputs set aside and a NaN score in their place, which reaches exactly the rows that see them.

A head dim that is the sum of two powers of two (80, 96, 192) is held in two pieces, so nothing is multiplied by padding.

Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 1.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.device.listed import List, first_of_listed, seen_bits
from rooftile.exact.backends.device.visibility import Mask, first_key, last_key, visible
from rooftile.exact.backends.triton.call import Call, call_of, constants_of, lists_of_queries, with_stand_ins
from rooftile.exact.backends.triton.schedule import dense_tile, packed_tile
from rooftile.exact.backends.triton.scores import (
    LN2,
    LOG2E,
    add_bias,
    dropout_mask,
    exponential,
    nan_if_non_finite,
    scaled_tanh,
    zero_non_finite,
)
from rooftile.exact.backends.triton.tiles import Tile, forward_tile
from rooftile.exact.spec import Options, Spec
from rooftile.runtime.launch import BoundedCache, Kernel, empties, kind_of

# keys per step of the NaN fallback: few, since it is rare and must not cost the main loop registers
NAN_SAFE_S = tl.constexpr(16)


# fmt: off
@triton.jit
def _walk(
    acc, acc_rest, m, l, q, q_rest,                             # the running softmax, the queries
    low, high, low_tiles, tiles,                                # the keys to visit
    k_ptr, v_ptr, k_stride_s, v_stride_s, mask,
    t, T, S, offset, b, h, factor, scale, softcap,
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
    if SPEC.REST_D:
        k_rest_offsets = s[:, None] * k_stride_s + (SPEC.BLOCK_D + tl.arange(0, SPEC.REST_D))[None, :]
    if SPEC.REST_DV:
        v_rest_offsets = s[:, None] * v_stride_s + (SPEC.BLOCK_DV + tl.arange(0, SPEC.REST_DV))[None, :]
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
        elif SPEC.D < SPEC.BLOCK_D:
            k = tl.load(k_tile, mask=(d < SPEC.D)[None, :], other=0.0)
        else:
            k = tl.load(k_tile)
        if NAN_SAFE:
            x = tl.dot(q, tl.trans(zero_non_finite(k)), input_precision=SPEC.PRECISION) + nan_if_non_finite(k, 1)[None, :]
        else:
            x = tl.dot(q, tl.trans(k), input_precision=SPEC.PRECISION)  # (BLOCK_T, BLOCK_S)
        if SPEC.REST_D:
            k_rest_tile = k_ptr + tl.cast(j_0, tl.int64) * k_stride_s + k_rest_offsets
            k_rest = tl.load(k_rest_tile, mask=(j < S)[:, None], other=0.0) if MASKED else tl.load(k_rest_tile)
            if NAN_SAFE:
                x += nan_if_non_finite(k_rest, 1)[None, :]
                k_rest = zero_non_finite(k_rest)
            x = tl.dot(q_rest, tl.trans(k_rest), x, input_precision=SPEC.PRECISION)
        if SPEC.SOFTCAP:
            x = scaled_tanh(x, scale, softcap) * (softcap * UNIT)
        elif not SPEC.FOLD:
            x = x * (scale * UNIT)
        x = add_bias(
            x, t[:, None], j[None, :], T, S, offset, bias_ptr, bias_stride_t, bias_stride_s, slope, SPEC.BIAS, SPEC.ALIBI, UNIT
        )
        if MASKED:
            v = tl.load(v_tile, mask=(j < S)[:, None] & (dv < SPEC.DV)[None, :], other=0.0)
        elif SPEC.DV < SPEC.BLOCK_DV:
            v = tl.load(v_tile, mask=(dv < SPEC.DV)[None, :], other=0.0)
        else:
            v = tl.load(v_tile)
        if MASKED:
            sees = visible(t[:, None] + offset, j[None, :], S, mask, SPEC)
            if SPEC.BITS:
                place = n // (SPEC.LIST_S // BLOCK_S)
                sees = sees & seen_bits(blocks.bits, place, blocks.part, t[:, None], j[None, :], S, SPEC)
            x = tl.where(sees, x, float("-inf"))

        m_new = tl.maximum(m, tl.max(x, 1))
        if MASKED or SPEC.BIAS:
            # a row that has met no key yet: -inf - -inf is nan
            reference = tl.where(m_new == float("-inf"), 0.0, m_new) * factor
        else:
            reference = m_new * factor
        p = exponential(x, reference[:, None], factor, SPEC.NATURAL)
        alpha = exponential(m, reference, factor, SPEC.NATURAL)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if SPEC.DROPOUT:
            p = tl.where(dropout_mask(seed, dropout[0], b, h, t[:, None], j[None, :]), p * dropout[1], 0.0)
        if NAN_SAFE:
            p = tl.where(sees, p + nan_if_non_finite(v, 1)[None, :], 0.0)
            v = zero_non_finite(v)
        if SPEC.REST_DV:
            v_rest_tile = v_ptr + tl.cast(j_0, tl.int64) * v_stride_s + v_rest_offsets
            v_rest = tl.load(v_rest_tile, mask=(j < S)[:, None], other=0.0) if MASKED else tl.load(v_rest_tile)
            if NAN_SAFE:
                p = tl.where(sees, p + nan_if_non_finite(v_rest, 1)[None, :], 0.0)
                v_rest = zero_non_finite(v_rest)
            acc_rest = tl.dot(p.to(v.dtype), v_rest, acc_rest * alpha[:, None], input_precision=SPEC.PRECISION)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=SPEC.PRECISION)
        m = m_new
    return acc, acc_rest, m, l


# fmt: off
@triton.jit(do_not_specialize=["B", "H", "T", "S", "tiles", "wave", "left", "right", "prefix", "chunk", "threshold"])
def _forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,                        # tensors
    bias_ptr, alibi_ptr, sinks_ptr, seed_ptr, cu_q_ptr, cu_k_ptr, counts_ptr, indices_ptr, bits_ptr,
    q_strides, k_strides, v_strides, bias_strides, alibi_strides,
    B, H, T, S, tiles, wave,                                    # sizes; packed: T and S are totals
    scale, softcap, left, right, prefix, chunk, threshold, keep_scale,
    list_numbers,
    SPEC: tl.constexpr, TILE: tl.constexpr,
):
    # fmt: on
    BLOCK_T: tl.constexpr = TILE.BLOCK_T
    BLOCK_S: tl.constexpr = TILE.BLOCK_S
    STAGES: tl.constexpr = TILE.num_stages
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    REST_DV: tl.constexpr = SPEC.REST_DV
    q_stride_b, q_stride_t, q_stride_h = q_strides
    k_stride_b, k_stride_s, k_stride_h = k_strides
    v_stride_b, v_stride_s, v_stride_h = v_strides
    bias_stride_b, bias_stride_h, bias_stride_t, bias_stride_s = bias_strides
    alibi_stride_b, alibi_stride_h = alibi_strides
    mask = Mask(left, right, prefix, chunk)
    dropout = (threshold, keep_scale)
    total = T
    if SPEC.PACKED:
        slot = tl.program_id(0) // H
        h = tl.program_id(0) % H
        b, i_t = packed_tile(slot, cu_q_ptr, B, BLOCK_T)
        row_0 = tl.load(cu_q_ptr + b).to(tl.int64)
        key_0 = tl.load(cu_k_ptr + b).to(tl.int64)
        T = (tl.load(cu_q_ptr + b + 1) - row_0).to(tl.int32)
        S = (tl.load(cu_k_ptr + b + 1) - key_0).to(tl.int32)
        if i_t * BLOCK_T >= T:
            return
        q_ptr += row_0 * q_stride_t
        k_ptr += key_0 * k_stride_s
        v_ptr += key_0 * v_stride_s
        o_ptr += (row_0 * H + h) * SPEC.DV
        lse_ptr += h.to(tl.int64) * total + row_0
        bias_ptr += row_0 * bias_stride_t
    else:
        bh, i_t = dense_tile(tl.program_id(0), tiles, B * H, wave, SPEC.RIGHT or SPEC.PREFIX)
        b = bh // H
        h = bh % H
        q_ptr += b.to(tl.int64) * q_stride_b
        k_ptr += b.to(tl.int64) * k_stride_b
        v_ptr += b.to(tl.int64) * v_stride_b
        o_ptr += (b.to(tl.int64) * T * H + h) * SPEC.DV
        lse_ptr += bh.to(tl.int64) * T
        bias_ptr += b.to(tl.int64) * bias_stride_b
    q_ptr += h.to(tl.int64) * q_stride_h
    k_ptr += (h // SPEC.GROUP).to(tl.int64) * k_stride_h
    v_ptr += (h // SPEC.GROUP).to(tl.int64) * v_stride_h
    bias_ptr += h.to(tl.int64) * bias_stride_h

    t_0 = i_t * BLOCK_T
    t = t_0 + tl.arange(0, BLOCK_T)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    # int64: position times stride passes 2**31 in a long context
    q_tile = q_ptr + t.to(tl.int64)[:, None] * q_stride_t + d[None, :]
    q = tl.load(q_tile, mask=(t < T)[:, None] & (d < SPEC.D)[None, :], other=0.0)

    q_rest = 0.0
    if SPEC.REST_D:
        q_rest_tile = q_ptr + t.to(tl.int64)[:, None] * q_stride_t + (SPEC.BLOCK_D + tl.arange(0, SPEC.REST_D))[None, :]
        q_rest = tl.load(q_rest_tile, mask=(t < T)[:, None], other=0.0)

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

    m = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_T,), tl.float32)
    acc = tl.zeros((BLOCK_T, BLOCK_DV), tl.float32)
    acc_rest = 0.0
    if REST_DV:
        acc_rest = tl.zeros((BLOCK_T, REST_DV), tl.float32)
    # fmt: off
    low_tiles = (clear_start - start) // BLOCK_S
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
        low_tiles = 0
        right_tiles = listed * (SPEC.LIST_S // BLOCK_S)
        safe_tiles = listed * (SPEC.LIST_S // NAN_SAFE_S)
        bits_row = list_row * list_part * (SPEC.LIST_T * (SPEC.LIST_S // 32))
        blocks = List(indices_ptr + list_row * list_most, bits_ptr + bits_row, list_part)
    acc, acc_rest, m, l = _walk(
        acc, acc_rest, m, l, q, q_rest, clear_start, clear_start, 0, clear_tiles,
        k_ptr, v_ptr, k_stride_s, v_stride_s, mask, t, T, S, offset, b, h, factor, scale, softcap,
        bias_ptr, bias_stride_t, bias_stride_s, slope, seed, dropout, blocks, SPEC, BLOCK_S, False, False, STAGES)
    acc, acc_rest, m, l = _walk(
        acc, acc_rest, m, l, q, q_rest, start, clear_stop, low_tiles, low_tiles + right_tiles,
        k_ptr, v_ptr, k_stride_s, v_stride_s, mask, t, T, S, offset, b, h, factor, scale, softcap,
        bias_ptr, bias_stride_t, bias_stride_s, slope, seed, dropout, blocks, SPEC, BLOCK_S, True, False, STAGES)
    if SPEC.LEFT or SPEC.RIGHT or SPEC.PREFIX or SPEC.CHUNK or SPEC.BLOCKS:
        has_nan = tl.max(tl.where(acc == acc, 0, 1))
        if REST_DV:
            has_nan += tl.max(tl.where(acc_rest == acc_rest, 0, 1))
        if has_nan > 0:
            m = tl.full((BLOCK_T,), float("-inf"), tl.float32)
            l = tl.zeros((BLOCK_T,), tl.float32)
            acc = tl.zeros((BLOCK_T, BLOCK_DV), tl.float32)
            if REST_DV:
                acc_rest = tl.zeros((BLOCK_T, REST_DV), tl.float32)
            acc, acc_rest, m, l = _walk(
                acc, acc_rest, m, l, q, q_rest, start, start, 0, safe_tiles,
                k_ptr, v_ptr, k_stride_s, v_stride_s, mask, t, T, S, offset, b, h, factor, scale, softcap,
                bias_ptr, bias_stride_t, bias_stride_s, slope, seed, dropout, blocks, SPEC, NAN_SAFE_S, True, True, 1)
    # fmt: on

    m = m * factor
    if SPEC.SINKS:
        sink = tl.load(sinks_ptr + h).to(tl.float32) * (1.0 if SPEC.NATURAL else LOG2E)
        m_new = tl.maximum(m, sink)
        # a sink of -inf beside no key: -inf - -inf is nan
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = exponential(m, reference, 1.0, SPEC.NATURAL)
        l = l * alpha + exponential(sink, reference, 1.0, SPEC.NATURAL)
        acc = acc * alpha[:, None]
        acc_rest = acc_rest * alpha[:, None] if REST_DV else acc_rest
        m = m_new
    sees_none = l == 0.0
    l = tl.where(sees_none, 1.0, l)
    lse = m * (1.0 if SPEC.NATURAL else LN2) + tl.log2(l) * LN2
    tl.store(lse_ptr + t, tl.where(sees_none, float("-inf"), lse), mask=t < T)
    o_tile = o_ptr + t.to(tl.int64)[:, None] * (H * SPEC.DV) + dv[None, :]
    tl.store(o_tile, (acc / l[:, None]).to(o_ptr.dtype.element_ty), mask=(t < T)[:, None] & (dv < SPEC.DV)[None, :])
    if REST_DV:
        rest_tile = o_ptr + t.to(tl.int64)[:, None] * (H * SPEC.DV) + (BLOCK_DV + tl.arange(0, REST_DV))[None, :]
        tl.store(rest_tile, (acc_rest / l[:, None]).to(o_ptr.dtype.element_ty), mask=(t < T)[:, None])


_start_forward = Kernel(_forward)


# the forward of each kind of call that was seen: a graph of torch.compile, and whoever is watched, prepares none
_PLANS = BoundedCache()
Forward = Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]]


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """The forward of a call, in the tile for its spec."""
    call = call_of(q, k, v, options, spec)
    key = (spec, kind_of(call.q, call.k, call.v, *call.options))
    ready = _PLANS.get(key)
    if ready is None:
        ready = _PLANS[key] = plan(call, forward_tile(spec))
    return ready(call.q, call.k, call.v, call.options)


def launch(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    """Returns o (B, T, H, Dv) and lse (B, H, T), or packed (total_q, H, Dv) and (H, total_q)."""
    return plan(call, tile)(call.q, call.k, call.v, call.options)


def plan(call: Call, tile: Tile) -> Forward:
    """The forward of tensors like the call's, with all but the outputs and the launch done; it holds no tensor."""
    programs, tiles = call.programs(call.T, tile.BLOCK_T, call.H)
    new_o = empties((*call.q.shape[:-1], call.v.shape[-1]), call.q.dtype, call.q.device)
    new_lse = empties(call.rows_shape, torch.float32, call.q.device)
    numbers = (*call.strides, call.B, call.H, call.T, call.S, tiles, call.wave, *call.numbers, call.list_numbers)
    launch = _start_forward.bound((programs, 1, 1), numbers, _constants(call.spec, tile)) if programs else None

    def run(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        o, lse = new_o(), new_lse()
        if launch is not None:
            launch(q, k, v, o, lse, *with_stand_ins(options, q), *lists_of_queries(options, q))
        return o, lse

    return run


@cache
def _constants(spec: Spec, tile: Tile) -> dict[str, Any]:
    """The compile-time arguments, put together once."""
    return {"SPEC": constants_of(spec).forward_spec, **tile.constants}
