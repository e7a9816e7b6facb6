"""The forward on quantised tensors, portable Triton: what `rooftile.numerics.recipe` makes, as its definition computes it.

    X  = scale (s_q s_k Q_8 K_8^T + shift)   INT8 or FP8 products, their scales, what smoothing took
    P  = 2^8 exp(X - m'), in e4m3            or in the tensors' dtype where the recipe leaves values alone
    O  = exp(m - m') O + s_v P_8 V_8         each block's product in fp32 from zero

in blocks of 128 keys, from the last to the first. Scales are looked up by the part that a row belongs to, so any granularity will do.
A tile whose result holds a NaN is computed again, code by code, as in `flash_fwd`; INT8 codes that stand for one are numbers to a matrix
product, so where a scale says that there are some (it is negative), all products are taken for NaN at first.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.exact.backends.device.visibility import MaskNumbers, first_key, last_key, visible
from rooftile.exact.backends.triton.call import constants_of
from rooftile.exact.backends.triton.schedule import place_of
from rooftile.exact.backends.triton.scores import LN2, LOG2E, scaled_tanh
from rooftile.exact.spec import Options, Spec
from rooftile.numerics import softmax
from rooftile.numerics.recipe import QuantisedQKV, part_of_rows
from rooftile.numerics.scaling import BLOCK
from rooftile.runtime.launch import Kernel

RAISED, TOO_LARGE = tl.constexpr(softmax.RAISED), tl.constexpr(softmax.TOO_LARGE)
# keys per step of the NaN fallback: few, since it is rare and must not cost the main loop registers
NAN_SAFE_S = tl.constexpr(16)


@triton.jit
def _decode(codes, INTEGER: tl.constexpr):
    """Decodes FP8 or INT8 codes to fp32; the INT8 code -128 is a NaN."""
    x = codes.to(tl.float32)
    if INTEGER:
        x = tl.where(x == -128.0, float("nan"), x)
    return x


@triton.jit
def _exceeds_format(x, m, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    """Whether a row's weights of a block are, as the definition has it: sums of two of each eight keys."""
    p = tl.exp2(x - tl.where(m == float("-inf"), 0.0, m)[:, None] + RAISED)
    sums = tl.sum(tl.sum(tl.reshape(p, (BLOCK_T, BLOCK_S // 8, 4, 2)), 3), 1)
    return tl.max(tl.where(sums < TOO_LARGE, 0, 1), 1) > 0


# fmt: off
@triton.jit
def _walk(
    q, q_scale, shift, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, part_k_ptr, k_stride_s, v_stride_s, scale_stride,
    start, stop, t, T, S, offset, sink, scale, softcap, mask,
    SPEC: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    INTEGER: tl.constexpr, SCALED: tl.constexpr, ROUND: tl.constexpr, BY_CHANNEL: tl.constexpr, NAN_SAFE: tl.constexpr,
):
    # fmt: on
    """The running softmax over the sink and the blocks of keys in [start, stop), from the last to the first."""
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    m = tl.full((BLOCK_T,), 0.0, tl.float32) + sink
    l = tl.where(m == float("-inf"), 0.0, 4.0)
    acc = tl.zeros((BLOCK_T, BLOCK_DV), tl.float32)
    blocks = tl.cdiv(stop - start, BLOCK_S)
    for n in range(0, blocks):
        j_0 = start + (blocks - 1 - n) * BLOCK_S
        j = j_0 + tl.arange(0, BLOCK_S)
        there = j < S
        lines = tl.cast(j, tl.int64)[:, None]
        k = tl.load(k_ptr + lines * k_stride_s + d[None, :], mask=there[:, None] & (d < SPEC.D)[None, :], other=0.0)
        v = tl.load(v_ptr + lines * v_stride_s + dv[None, :], mask=there[:, None] & (dv < SPEC.DV)[None, :], other=0.0)
        sees = visible(t[:, None] + offset, j[None, :], S, mask, SPEC)
        if NAN_SAFE:
            x = tl.dot(_decode(q, INTEGER), tl.trans(_decode(k, INTEGER)), input_precision="ieee")
        else:
            x = tl.dot(q, tl.trans(k)).to(tl.float32)
        v_scale = 1.0
        if SCALED:
            k_scale = tl.load(k_scales_ptr + tl.load(part_k_ptr + j, mask=there, other=0) * scale_stride, mask=there, other=0.0)
            k_scale = tl.abs(k_scale) if NAN_SAFE else tl.where(k_scale < 0.0, float("nan"), k_scale)
            x = x * (q_scale[:, None] * k_scale[None, :])
        x = (x + shift[:, None]) * scale
        if SPEC.SOFTCAP:
            x = scaled_tanh(x, 1.0, softcap) * softcap
        x = tl.where(sees, x * LOG2E, float("-inf"))
        m_new = tl.where((m == float("-inf")) | _exceeds_format(x, m, BLOCK_T, BLOCK_S), tl.max(x, 1), m)
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(x - reference[:, None] + RAISED)
        alpha = tl.exp2(m - reference)
        l = l * alpha + tl.sum(p, 1)
        if ROUND:
            if BY_CHANNEL:
                v_scale = tl.load(v_scales_ptr + dv, mask=dv < SPEC.DV, other=0.0)[None, :]
            else:
                v_scale = tl.load(v_scales_ptr + tl.load(part_k_ptr + j_0) * scale_stride)
        if NAN_SAFE:
            values = v.to(tl.float32)
            lost = tl.where(values == values, 0.0, 1.0)
            part = tl.dot(p, tl.where(values == values, values, 0.0), input_precision="ieee")
            # a row that sees a NaN value gets NaN in that column
            seen = tl.dot(tl.where(sees, 1.0, 0.0), lost, input_precision="ieee")
            part = tl.where(seen > 0.0, float("nan"), part)
        else:
            part = tl.dot(p.to(v.dtype), v)
        acc = acc * alpha[:, None] + part * v_scale
        m = m_new
    return acc, m, l


# fmt: off
@triton.jit(do_not_specialize=["B", "H", "T", "S", "tiles", "left", "right", "prefix", "chunk"])
def _forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_scales_ptr, k_scales_ptr, v_scales_ptr, shift_ptr, part_q_ptr, part_k_ptr,
    sinks_ptr, cu_q_ptr, cu_k_ptr,
    B, H, T, S, tiles, scale, softcap, left, right, prefix, chunk,
    SPEC: tl.constexpr, INTEGER: tl.constexpr, SCALED: tl.constexpr, ROUND: tl.constexpr, BY_CHANNEL: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):
    # fmt: on
    mask = MaskNumbers(left, right, prefix, chunk)
    total = T
    Hk = H // SPEC.GROUP
    b, h, i_t, bh, row_0, key_0, T, S = place_of(
        tl.program_id(0), cu_q_ptr, cu_q_ptr, cu_k_ptr, B, H, T, S, tiles, B * H, BLOCK_T, SPEC.RIGHT or SPEC.PREFIX, SPEC.PACKED
    )
    if SPEC.PACKED:
        if i_t * BLOCK_T >= T:
            return
        lse_ptr += h.to(tl.int64) * total + row_0
    else:
        lse_ptr += bh.to(tl.int64) * T
    # all are contiguous: rows of all heads
    h_k = h // SPEC.GROUP
    q_ptr += row_0 * H * SPEC.D + h * SPEC.D
    k_ptr += key_0 * Hk * SPEC.D + h_k * SPEC.D
    v_ptr += key_0 * Hk * SPEC.DV + h_k * SPEC.DV
    o_ptr += row_0 * H * SPEC.DV + h * SPEC.DV
    part_q_ptr += row_0
    part_k_ptr += key_0
    k_scales_ptr += h_k
    v_scales_ptr += (b * Hk + h_k) * SPEC.DV if BY_CHANNEL else h_k

    t = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, SPEC.BLOCK_D)
    dv = tl.arange(0, SPEC.BLOCK_DV)
    there = t < T
    lines = t.to(tl.int64)
    q = tl.load(q_ptr + lines[:, None] * (H * SPEC.D) + d[None, :], mask=there[:, None] & (d < SPEC.D)[None, :], other=0.0)
    q_scale = tl.full((BLOCK_T,), 1.0, tl.float32)
    if SCALED:
        q_scale = tl.load(q_scales_ptr + tl.load(part_q_ptr + t, mask=there, other=0) * H + h, mask=there, other=1.0)
    shift = tl.zeros((BLOCK_T,), tl.float32)
    if SHIFT:
        shift = tl.load(shift_ptr + (row_0 + lines) * H + h, mask=there, other=0.0)

    # a sink is a key with a value of zero
    sink = float("-inf")
    if SPEC.SINKS:
        sink = tl.load(sinks_ptr + h).to(tl.float32) * LOG2E
    offset = S - T
    start = first_key(i_t * BLOCK_T + offset, mask, SPEC) // BLOCK_S * BLOCK_S
    bottom = tl.minimum(i_t * BLOCK_T + BLOCK_T, T) - 1 + offset
    stop = tl.maximum(last_key(bottom, S, mask, SPEC) + 1, start)
    # fmt: off
    acc, m, l = _walk(
        q, tl.where(q_scale < 0.0, float("nan"), q_scale), shift, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, part_k_ptr, Hk * SPEC.D, Hk * SPEC.DV, Hk,
        start, stop, t, T, S, offset, sink, scale, softcap, mask, SPEC, BLOCK_T, BLOCK_S, INTEGER, SCALED, ROUND, BY_CHANNEL, False)
    lost = tl.max(tl.where(acc == acc, 0, 1))
    if lost > 0:
        acc, m, l = _walk(
            q, tl.abs(q_scale), shift, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, part_k_ptr, Hk * SPEC.D, Hk * SPEC.DV, Hk,
            start, stop, t, T, S, offset, sink, scale, softcap, mask, SPEC, BLOCK_T, NAN_SAFE_S, INTEGER, SCALED, ROUND, BY_CHANNEL, True)
    # fmt: on
    sees_none = l == 0.0
    l = tl.where(sees_none, 1.0, l)
    lse = (m + tl.log2(l) - RAISED) * LN2
    tl.store(lse_ptr + t, tl.where(sees_none, float("-inf"), lse), mask=there)
    o_tile = o_ptr + lines[:, None] * (H * SPEC.DV) + dv[None, :]
    tl.store(o_tile, (acc / l[:, None]).to(o_ptr.dtype.element_ty), mask=there[:, None] & (dv < SPEC.DV)[None, :])


_start_forward = Kernel(_forward)


def attend(qkv: QuantisedQKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """o and lse of a recipe's tensors."""
    q, k, v = qkv.q.contiguous(), qkv.k.contiguous(), qkv.v.contiguous()
    recipe = qkv.precision
    packed = qkv.cu_q is not None
    B = qkv.cu_q.shape[0] - 1 if qkv.cu_q is not None else q.shape[0]
    T, H = q.shape[-3:-1]
    o = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=qkv.dtype, device=q.device)
    lse = torch.empty((H, T) if packed else (B, H, T), dtype=torch.float32, device=q.device)
    rows = _tile(spec)["BLOCK_T"]
    tiles = -(-T // rows)
    programs = (T // rows + B) * H if packed else tiles * B * H
    if not lse.numel():
        return o, lse
    part_q, part_k = (part_of_rows(x, recipe.granularity, cu)[0].int() for x, cu in ((q, qkv.cu_q), (k, qkv.cu_k)))
    stand_ins = (qkv.q_scales, qkv.k_scales, qkv.v_scales, qkv.shift)
    scalars = constants_of(spec).numbers[:6]
    arguments = (
        q, k, v, o, lse, *(lse if x is None else x for x in stand_ins), part_q, part_k,
        *(lse if x is None else x.contiguous() for x in (options.sinks, qkv.cu_q, qkv.cu_k)),
        B, H, T, k.shape[-3], tiles, *scalars,
    )  # fmt: skip
    _start_forward((programs, 1, 1), arguments, _constants(spec, qkv))
    return o, lse


def _tile(spec: Spec) -> dict[str, int]:
    """Keys by the block that shares a scale; of wide heads what fits, and on Hopper the 64 rows of its matrix instructions."""
    if max(spec.dim, spec.dim_v) > 128:
        rows = 64 if spec.device == "sm90" else 32
        return {"BLOCK_T": rows, "BLOCK_S": rows, "num_warps": 4, "num_stages": 1}
    return {"BLOCK_T": 64, "BLOCK_S": BLOCK, "num_warps": 4, "num_stages": 2}


def _constants(spec: Spec, qkv: QuantisedQKV) -> dict[str, Any]:
    by_channel = qkv.v_scales is not None and qkv.v_scales.shape[-1] > 1
    return _constants_of(
        spec, qkv.q.dtype == torch.int8, qkv.q_scales is not None, qkv.v_scales is not None, by_channel, qkv.shift is not None
    )


@cache
def _constants_of(spec: Spec, integer: bool, scaled: bool, rounds: bool, by_channel: bool, shift: bool) -> dict[str, Any]:
    return {"SPEC": constants_of(spec).spec} | _tile(spec) | {
        "INTEGER": integer, "SCALED": scaled, "ROUND": rounds, "BY_CHANNEL": by_channel, "SHIFT": shift,
    }  # fmt: skip
