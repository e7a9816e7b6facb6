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

from rooftile.exact.backends.device.listed import ListPointers, first_of_listed
from rooftile.exact.backends.device.visibility import MaskNumbers
from rooftile.exact.backends.triton.call import TritonCall, call_of, constants_of, lists_of_queries, with_stand_ins
from rooftile.exact.backends.triton.schedule import first_of_head, key_tiles, place_of
from rooftile.exact.backends.triton.scores import (
    LN2,
    LOG2E,
    OptionNumbers,
    OptionTensors,
    drop,
    exponential,
    load_rows,
    nan_if_non_finite,
    score,
    scoring_of,
    seed_of,
    seen,
    zero_non_finite,
)
from rooftile.exact.backends.triton.tiles import BlockShape, forward_tile
from rooftile.exact.spec import Options, Spec, output_dtype
from rooftile.runtime.launch import BoundedCache, Kernel, empties, kind_of

# keys per step of the NaN fallback: few, since it is rare and must not cost the main loop registers
NAN_SAFE_S = tl.constexpr(16)


# fmt: off
@triton.jit
def _walk(
    acc, acc_rest, m, l, q, q_rest, t,                          # the running softmax, the queries
    low, high, low_tiles, tiles,                                # the keys to visit
    k_ptr, v_ptr, k_stride_s, v_stride_s, scoring, blocks,
    SPEC: tl.constexpr, BLOCK_S: tl.constexpr, MASKED: tl.constexpr, NAN_SAFE: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Walks `tiles` tiles of keys: `low_tiles` of them from key `low` on, the others from key `high` on; or along a list."""
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    factor = scoring.factor
    k_offsets = s[:, None] * k_stride_s + d[None, :]
    v_offsets = s[:, None] * v_stride_s + dv[None, :]
    if SPEC.REST_D:
        k_rest_offsets = s[:, None] * k_stride_s + (SPEC.BLOCK_D + tl.arange(0, SPEC.REST_D))[None, :]
    if SPEC.REST_DV:
        v_rest_offsets = s[:, None] * v_stride_s + (SPEC.BLOCK_DV + tl.arange(0, SPEC.REST_DV))[None, :]
    for n in tl.range(0, tiles, num_stages=STAGES):
        if SPEC.BLOCKS:
            j_0 = first_of_listed(n, blocks.entries, scoring.S, SPEC.LIST_S, BLOCK_S, 1)
        else:
            j_0 = tl.where(n < low_tiles, low + n * BLOCK_S, high + (n - low_tiles) * BLOCK_S)
        # int64: position times stride passes 2**31 in a long context
        k_tile = k_ptr + tl.cast(j_0, tl.int64) * k_stride_s + k_offsets
        v_tile = v_ptr + tl.cast(j_0, tl.int64) * v_stride_s + v_offsets
        j = j_0 + s
        there = j < scoring.S
        k = load_rows(k_tile, there, d, SPEC.D, MASKED)
        if NAN_SAFE:
            x = tl.dot(q, tl.trans(zero_non_finite(k)), input_precision=SPEC.PRECISION) + nan_if_non_finite(k, 1)[None, :]
        else:
            x = tl.dot(q, tl.trans(k), input_precision=SPEC.PRECISION)  # (BLOCK_T, BLOCK_S)
        if SPEC.REST_D:
            k_rest_tile = k_ptr + tl.cast(j_0, tl.int64) * k_stride_s + k_rest_offsets
            k_rest = tl.load(k_rest_tile, mask=there[:, None], other=0.0) if MASKED else tl.load(k_rest_tile)
            if NAN_SAFE:
                x += nan_if_non_finite(k_rest, 1)[None, :]
                k_rest = zero_non_finite(k_rest)
            x = tl.dot(q_rest, tl.trans(k_rest), x, input_precision=SPEC.PRECISION)
        x, _ = score(x, t[:, None], j[None, :], scoring, SPEC)
        v = load_rows(v_tile, there, dv, SPEC.DV, MASKED)
        if MASKED:
            sees = seen(t[:, None], j[None, :], n, scoring, blocks, SPEC, BLOCK_S)
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
            p = drop(p, t[:, None], j[None, :], scoring)
        if NAN_SAFE:
            p = tl.where(sees, p + nan_if_non_finite(v, 1)[None, :], 0.0)
            v = zero_non_finite(v)
        if SPEC.REST_DV:
            v_rest_tile = v_ptr + tl.cast(j_0, tl.int64) * v_stride_s + v_rest_offsets
            v_rest = tl.load(v_rest_tile, mask=there[:, None], other=0.0) if MASKED else tl.load(v_rest_tile)
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
    total = T
    b, h, i_t, bh, row_0, key_0, T, S = place_of(
        tl.program_id(0), cu_q_ptr, cu_q_ptr, cu_k_ptr, B, H, T, S, tiles, wave, BLOCK_T, SPEC.RIGHT or SPEC.PREFIX, SPEC.PACKED
    )
    if SPEC.PACKED:
        if i_t * BLOCK_T >= T:
            return
        lse_ptr += h.to(tl.int64) * total + row_0
    else:
        lse_ptr += bh.to(tl.int64) * T
    o_ptr += (row_0 * H + h) * SPEC.DV
    q_ptr = first_of_head(q_ptr, q_strides, b, row_0, h, SPEC.PACKED)
    k_ptr = first_of_head(k_ptr, k_strides, b, key_0, h // SPEC.GROUP, SPEC.PACKED)
    v_ptr = first_of_head(v_ptr, v_strides, b, key_0, h // SPEC.GROUP, SPEC.PACKED)
    q_stride_t, k_stride_s, v_stride_s = q_strides[1], k_strides[1], v_strides[1]

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

    numbers = OptionNumbers(scale, softcap, MaskNumbers(left, right, prefix, chunk), threshold, keep_scale)
    options = OptionTensors(bias_ptr, bias_strides, alibi_ptr, alibi_strides, sinks_ptr, seed_ptr)
    scoring = scoring_of(T, S, numbers, options, seed_of(options, SPEC), b, row_0, h, SPEC)
    factor = scoring.factor

    m = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_T,), tl.float32)
    acc = tl.zeros((BLOCK_T, BLOCK_DV), tl.float32)
    acc_rest = 0.0
    if REST_DV:
        acc_rest = tl.zeros((BLOCK_T, REST_DV), tl.float32)
    lists = ListPointers(counts_ptr, indices_ptr, bits_ptr, list_numbers)
    walk = key_tiles(t_0, T, S, numbers.mask, lists, cu_q_ptr, b, h, SPEC, BLOCK_T, BLOCK_S, NAN_SAFE_S)
    # fmt: off
    acc, acc_rest, m, l = _walk(
        acc, acc_rest, m, l, q, q_rest, t, walk.clear_start, walk.clear_start, 0, walk.clear,
        k_ptr, v_ptr, k_stride_s, v_stride_s, scoring, walk.blocks, SPEC, BLOCK_S, False, False, STAGES)
    acc, acc_rest, m, l = _walk(
        acc, acc_rest, m, l, q, q_rest, t, walk.start, walk.clear_stop, walk.left, walk.left + walk.right,
        k_ptr, v_ptr, k_stride_s, v_stride_s, scoring, walk.blocks, SPEC, BLOCK_S, True, False, STAGES)
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
                acc, acc_rest, m, l, q, q_rest, t, walk.start, walk.start, 0, walk.safe,
                k_ptr, v_ptr, k_stride_s, v_stride_s, scoring, walk.blocks, SPEC, NAN_SAFE_S, True, True, 1)
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


def launch(call: TritonCall, tile: BlockShape) -> tuple[Tensor, Tensor]:
    """Returns o (B, T, H, Dv) and lse (B, H, T), or packed (total_q, H, Dv) and (H, total_q)."""
    return plan(call, tile)(call.q, call.k, call.v, call.options)


def plan(call: TritonCall, tile: BlockShape) -> Forward:
    """The forward of tensors like the call's, with all but the outputs and the launch done; it holds no tensor."""
    programs, tiles = call.programs(call.T, tile.BLOCK_T, call.H)
    new_o = empties((*call.q.shape[:-1], call.v.shape[-1]), output_dtype(call.q, call.spec), call.q.device)
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
def _constants(spec: Spec, tile: BlockShape) -> dict[str, Any]:
    """The compile-time arguments, put together once."""
    return {"SPEC": constants_of(spec).forward_spec, **tile.constants}
