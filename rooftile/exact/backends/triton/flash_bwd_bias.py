"""The gradient of the bias, portable Triton.

    dbias = sum over what was broadcast of dX,    dX = P (dO V^T - D)

Each program owns one tile of the bias and walks every batch row, head, query tile and key tile that was added to it, making
P and dP again. One owner a sum: no atomics, no T x S matrix but the bias's own gradient, the same bits every time.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.device.row_stats import unpack_lse_delta
from rooftile.exact.backends.device.visibility import MaskNumbers, visible
from rooftile.exact.backends.triton.call import TritonCall, call_of, constants_of, strides_of
from rooftile.exact.backends.triton.schedule import packed_tile
from rooftile.exact.backends.triton.scores import LOG2E, add_bias, dropout_mask, exponent, place_in_whole, scaled_tanh
from rooftile.exact.backends.triton.tiles import BlockShape, backward_bias_tile
from rooftile.exact.spec import Options, Spec
from rooftile.runtime.launch import Kernel


# fmt: off
@triton.jit(do_not_specialize=[
    "B", "H", "T", "S", "slots", "left", "right", "prefix", "chunk", "threshold", "rows", "columns", "BIAS_B", "BIAS_H",
])
def _backward_bias(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, rests_ptr, dbias_ptr,   # tensors
    bias_ptr, alibi_ptr, sinks_ptr, seed_ptr, cu_q_ptr, cu_k_ptr,
    q_strides, k_strides, v_strides, bias_strides, alibi_strides, do_strides,
    B, H, T, S, padded_T, slots, rows, columns, BIAS_B, BIAS_H,           # sizes; the bias is (BIAS_B, BIAS_H, rows, columns)
    scale, softcap, left, right, prefix, chunk, threshold, keep_scale,
    SPEC: tl.constexpr, ONE_ROW: tl.constexpr, ONE_COLUMN: tl.constexpr, TILE: tl.constexpr,
):
    # fmt: on
    BLOCK_T: tl.constexpr = TILE.BLOCK_T
    BLOCK_S: tl.constexpr = TILE.BLOCK_S
    q_stride_b, q_stride_t, q_stride_h = q_strides
    k_stride_b, k_stride_s, k_stride_h = k_strides
    v_stride_b, v_stride_s, v_stride_h = v_strides
    bias_stride_b, bias_stride_h, bias_stride_t, bias_stride_s = bias_strides
    alibi_stride_b, alibi_stride_h = alibi_strides
    do_stride_b, do_stride_t, do_stride_h = do_strides
    mask = MaskNumbers(left, right, prefix, chunk)
    UNIT: tl.constexpr = 1.0 if SPEC.NATURAL else LOG2E
    own_s = tl.program_id(0)
    own_t = tl.program_id(1)
    bias_b = tl.program_id(2) // BIAS_H
    bias_h = tl.program_id(2) % BIAS_H
    over_b = B // BIAS_B if not SPEC.PACKED else 1
    over_h = H // BIAS_H
    over_t = slots if ONE_ROW else 1
    over_s = tl.cdiv(S, BLOCK_S) if ONE_COLUMN else 1
    seed = 0
    if SPEC.DROPOUT:
        seed = tl.load(seed_ptr)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    acc = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)
    row_out = own_t * BLOCK_T
    length_out = rows
    steps = over_b * over_h * over_t * over_s
    # a dense tile of both axes meets its own queries and keys each time
    OWN: tl.constexpr = not (SPEC.PACKED or ONE_ROW or ONE_COLUMN)
    own_bias = 0.0
    if OWN:
        t = own_t * BLOCK_T + tl.arange(0, BLOCK_T)
        j = own_s * BLOCK_S + tl.arange(0, BLOCK_S)
        own = bias_ptr + bias_b.to(tl.int64) * bias_stride_b + bias_h.to(tl.int64) * bias_stride_h
        own_bias = add_bias(
            tl.zeros((BLOCK_T, BLOCK_S), tl.float32), t[:, None], j[None, :], T, S, 0, own, bias_stride_t, bias_stride_s, 0.0,
            True, False, UNIT,
        )  # fmt: skip
        sees = visible(t[:, None] + (S - T), j[None, :], S, mask, SPEC)
        steps = tl.where(tl.max(tl.max(sees.to(tl.int32), 1), 0) > 0, steps, 0)
    for n in tl.range(0, steps, num_stages=TILE.num_stages):
        i_s = own_s + n % over_s
        i_t = own_t + n // over_s % over_t
        h = bias_h + n // (over_s * over_t) % over_h
        b = bias_b + n // (over_s * over_t * over_h)
        row_0 = tl.cast(0, tl.int64)
        key_0 = tl.cast(0, tl.int64)
        length = T
        keys = S
        if SPEC.PACKED:
            b, i_t = packed_tile(i_t, cu_q_ptr, B, BLOCK_T)
            row_0 = tl.load(cu_q_ptr + b).to(tl.int64)
            key_0 = tl.load(cu_k_ptr + b).to(tl.int64)
            length = (tl.load(cu_q_ptr + b + 1) - row_0).to(tl.int32)
            keys = (tl.load(cu_k_ptr + b + 1) - key_0).to(tl.int32)
            stats_h = h.to(tl.int64) * padded_T + row_0
            if not ONE_ROW:
                row_out = row_0.to(tl.int32) + i_t * BLOCK_T
                length_out = row_0.to(tl.int32) + length
        else:
            stats_h = (b.to(tl.int64) * H + h) * padded_T
        batch = tl.cast(b, tl.int64) * (0 if SPEC.PACKED else 1)
        offset = keys - length
        t = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
        j = i_s * BLOCK_S + tl.arange(0, BLOCK_S)
        here = (t < length)[:, None]
        there = (j < keys)[:, None]
        row = (row_0 + t)[:, None]
        key = (key_0 + j)[:, None]
        hk = (h // SPEC.GROUP).to(tl.int64)
        q_tile = q_ptr + batch * q_stride_b + h.to(tl.int64) * q_stride_h + row * q_stride_t + d[None, :]
        k_tile = k_ptr + batch * k_stride_b + hk * k_stride_h + key * k_stride_s + d[None, :]
        v_tile = v_ptr + batch * v_stride_b + hk * v_stride_h + key * v_stride_s + dv[None, :]
        do_tile = do_ptr + batch * do_stride_b + h.to(tl.int64) * do_stride_h + row * do_stride_t + dv[None, :]
        q = tl.load(q_tile, mask=here & (d < SPEC.D)[None, :], other=0.0)
        k = tl.load(k_tile, mask=there & (d < SPEC.D)[None, :], other=0.0)
        v = tl.load(v_tile, mask=there & (dv < SPEC.DV)[None, :], other=0.0)
        do = tl.load(do_tile, mask=here & (dv < SPEC.DV)[None, :], other=0.0)
        _, delta = unpack_lse_delta(tl.load(stats_ptr + stats_h + t, mask=t < length, other=0))
        lse, rest = unpack_lse_delta(tl.load(rests_ptr + stats_h + t, mask=t < length, other=0))
        draw_b, draw_h, first_t, first_j, distance = place_in_whole(seed_ptr, b, h, offset, SPEC.PLACED)
        slope = 0.0
        if SPEC.ALIBI:
            slope = tl.load(alibi_ptr + b * alibi_stride_b + h * alibi_stride_h).to(tl.float32)
        x = tl.dot(q, tl.trans(k), input_precision=SPEC.PRECISION)
        if SPEC.SOFTCAP:
            x = scaled_tanh(x, scale, softcap) * (softcap * UNIT)
        else:
            x = x * (scale * UNIT)
        first = bias_ptr + batch * bias_stride_b + h.to(tl.int64) * bias_stride_h + row_0 * bias_stride_t
        if OWN:
            x += own_bias
        x = add_bias(
            x, t[:, None], j[None, :], length, keys, distance, first, bias_stride_t, bias_stride_s, slope, not OWN, SPEC.ALIBI,
            UNIT,
        )  # fmt: skip
        p = tl.exp2(exponent(x, lse[:, None], 1.0, SPEC.NATURAL) - rest[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision=SPEC.PRECISION)
        if SPEC.DROPOUT:
            keep = dropout_mask(seed, threshold, draw_b, draw_h, first_t + t[:, None], first_j + j[None, :])
            dp = tl.where(keep, dp * keep_scale, 0.0)
        sees = visible(
            t[:, None] + offset, j[None, :], keys, mask, SPEC
        )
        acc += tl.where(sees & here, p * (dp - delta[:, None]), 0.0)

    # what was broadcast along the tile itself is summed up here; the bias's gradient is contiguous
    t = row_out + tl.arange(0, BLOCK_T)
    j = own_s * BLOCK_S + tl.arange(0, BLOCK_S)
    out = dbias_ptr + tl.program_id(2).to(tl.int64) * rows * columns
    if ONE_ROW and ONE_COLUMN:
        tl.store(out, tl.sum(tl.sum(acc, 1), 0).to(dbias_ptr.dtype.element_ty))
    elif ONE_ROW:
        tl.store(out + j, tl.sum(acc, 0).to(dbias_ptr.dtype.element_ty), mask=j < columns)
    elif ONE_COLUMN:
        tl.store(out + t, tl.sum(acc, 1).to(dbias_ptr.dtype.element_ty), mask=t < length_out)
    else:
        tile = out + t.to(tl.int64)[:, None] * columns + j[None, :]
        tl.store(tile, acc.to(dbias_ptr.dtype.element_ty), mask=(t < length_out)[:, None] & (j < columns)[None, :])


_start_backward = Kernel(_backward_bias)


def gradient(q: Tensor, k: Tensor, v: Tensor, do: Tensor, words: Tensor, rests: Tensor, options: Options, spec: Spec) -> Tensor:
    """The gradient of the bias of dense or packed q, k and v, in its shape and dtype; `device.row_stats` has words and rests."""
    return launch(call_of(q, k, v, options, spec), backward_bias_tile(spec), do, strides_of(do), words, rests)


def launch(call: TritonCall, tile: BlockShape, do: Tensor, do_strides: tuple[int, ...], words: Tensor, rests: Tensor) -> Tensor:
    """Returns the gradient in the shape and dtype of the bias."""
    bias = call.options.bias
    heads = bias.shape[:-2] if not call.packed else (1, bias.shape[0])
    rows, columns = bias.shape[-2:]
    empty = torch.empty if min(call.T, call.S, call.B) else torch.zeros
    dbias = empty(bias.shape, dtype=bias.dtype, device=bias.device)
    if not (dbias.numel() and min(call.T, call.S, call.B)):
        return dbias
    slots, _ = call.programs(call.T, tile.BLOCK_T, 1)
    slots = slots if call.packed else -(-call.T // tile.BLOCK_T)
    # an axis of one that is not broadcast is a tile like any other
    one_row, one_column = rows == 1, columns == 1
    grid = (1 if one_column else -(-columns // tile.BLOCK_S), 1 if one_row else slots, heads[0] * heads[1])
    arguments = (
        call.q, call.k, call.v, do, words, rests, dbias, *call.option_tensors, *call.strides, do_strides,
        call.B, call.H, call.T, call.S, call.padded_T, slots, rows, columns, heads[0], heads[1], *call.numbers,
    )  # fmt: skip
    _start_backward(grid, arguments, _constants(call.spec, tile, one_row, one_column))
    return dbias


@cache
def _constants(spec: Spec, tile: BlockShape, one_row: bool, one_column: bool) -> dict[str, Any]:
    return {"SPEC": constants_of(spec).spec, "ONE_ROW": one_row, "ONE_COLUMN": one_column} | tile.constants
