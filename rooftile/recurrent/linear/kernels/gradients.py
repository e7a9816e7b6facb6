"""The gradients. With w = 1 / den, dN = w dO and u = -w rowsum(dO * O), the gradient of den:

    dA = dN V^T + u                            A and dA under the causal mask
    df(Q) = dA f(K)   + dN S^T + u z^T         S, z: the state before the chunk
    df(K) = dA^T f(Q) + V R^T + r              R, r: the sums of f(Q)^T dN and f(Q)^T u over later chunks
    dV    = A^T dN    + f(K) R

S walks forwards with the queries, R backwards with the keys. Each kernel owns a tile of columns of one gradient, so that its tile of
the state stays in registers: A and dA are computed again for each. Features are computed again from the tiles, and their slopes too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.recurrent.linear.kernels.tiles import (
    EMPTY,
    SEGMENT,
    features,
    head_rows,
    is_lost,
    lost_after,
    lost_before,
    rows,
    segment_of,
    slope,
    state,
    sum_of_state,
)
from rooftile.runtime.launch import Kernel


# fmt: off
@triton.jit(do_not_specialize=["total"])
def _row_gradients(
    do_ptr, o_ptr, den_ptr, weight_ptr, unit_ptr, total,
    DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
):
    # fmt: on
    """Writes w and u of BLOCK rows; do and o are contiguous."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, BLOCK_V)
    here = r < total
    there = here[:, None] & (e < DV)[None, :]
    place = r[:, None] * DV + e[None, :]
    do = tl.load(do_ptr + place, mask=there, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + place, mask=there, other=0.0).to(tl.float32)
    den = tl.load(den_ptr + r, mask=here, other=1.0)
    empty = tl.abs(den) < EMPTY
    weight = tl.where(empty, 0.0, 1 / tl.where(empty, 1.0, den))
    tl.store(weight_ptr + r, weight, mask=here)
    tl.store(unit_ptr + r, -weight * tl.sum(do * o, 1), mask=here)


_start_rows = Kernel(_row_gradients)


@cache
def _row_constants(dim_v: int) -> dict[str, Any]:
    block_v = triton.next_power_of_2(dim_v)
    return {"DV": dim_v, "BLOCK": max(4096 // block_v, 1), "BLOCK_V": block_v, "num_warps": 4}


def row_gradients(do: Tensor, o: Tensor, den: Tensor) -> tuple[Tensor, Tensor]:
    """Computes w and u of each row of contiguous tensors."""
    weight, unit = torch.empty_like(den), torch.empty_like(den)
    if den.numel():
        constants = _row_constants(do.shape[-1])
        programs = triton.cdiv(den.numel(), constants["BLOCK"])
        _start_rows((programs, 1, 1), (do, o, den, weight, unit, den.numel()), constants)
    return weight, unit


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _query_gradients(
    q_ptr, k_ptr, v_ptr, do_ptr, weight_ptr, unit_ptr, dq_ptr, s_ptr, z_ptr, lost_ptr, cu_ptr,
    q_strides, k_strides, v_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, FEATURE: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """dq of a segment of a query head, BLOCK_D of its columns."""
    slot, h = tl.program_id(0), tl.program_id(1)
    hk = h // GROUP
    b, length, first, start = segment_of(slot, cu_ptr, T, B, PACKED)
    if start >= length:
        return
    batch = b.to(tl.int64)
    d, e, n = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK)
    lower = n[:, None] >= n[None, :]
    head = (slot if CAUSAL else b).to(tl.int64) * HEADS + hk
    s = state(s_ptr, head, d, e, D, DV, CAUSAL)
    z = sum_of_state(z_ptr, head, d, D, DV, CAUSAL)
    careful = False
    if CAUSAL:
        careful = tl.load(lost_ptr + slot * HEADS + hk) != 0
    q_base = q_ptr + batch * q_strides[0] + h.to(tl.int64) * q_strides[2]
    k_base = k_ptr + batch * k_strides[0] + hk.to(tl.int64) * k_strides[2]
    v_base = v_ptr + batch * v_strides[0] + hk.to(tl.int64) * v_strides[2]
    for c in range(start, tl.minimum(start + SEGMENT, length), BLOCK):
        t = c + n
        here = t < length
        there = here[:, None] & (d < D)[None, :]
        row = ((0 if PACKED else batch * T) + first + t) * (HEADS * GROUP) + h
        do = tl.load(do_ptr + row[:, None] * DV + e[None, :], mask=here[:, None] & (e < DV)[None, :], other=0.0)
        dn = (do.to(tl.float32) * tl.load(weight_ptr + row, mask=here, other=0.0)[:, None]).to(DOT)
        u = tl.load(unit_ptr + row, mask=here, other=0.0)
        df = tl.dot(dn, tl.trans(s.to(DOT)), input_precision=PRECISION) + u[:, None] * z[None, :]
        if CAUSAL:
            f_k = features(rows(k_base, first, t, d, here, d < D, k_strides[1]), there, FEATURE)
            v = rows(v_base, first, t, e, here, e < DV, v_strides[1])
            da = tl.dot(dn, tl.trans(v.to(DOT)), input_precision=PRECISION) + u[:, None]
            da = tl.where(lower, da, 0.0)
            seen = f_k
            if careful:
                df += lost_before(is_lost(f_k), n)
                seen = tl.where(is_lost(f_k), 0.0, f_k)
            df = tl.dot(da.to(DOT), seen.to(DOT), df, input_precision=PRECISION)
            s = tl.dot(tl.trans(f_k.to(DOT)), v.to(DOT), s, input_precision=PRECISION)
            z += tl.sum(f_k, 0)
        dq = df * slope(rows(q_base, first, t, d, here, d < D, q_strides[1]), FEATURE)
        tl.store(dq_ptr + row[:, None] * D + d[None, :], dq.to(dq_ptr.dtype.element_ty), mask=there)


@triton.jit
def _queries(
    q_ptr, do_ptr, weight_ptr, q_strides, batch, first, row, h, t, d, e, here,
    D: tl.constexpr, DV: tl.constexpr, FEATURE: tl.constexpr,
):  # fmt: skip
    """Loads f(Q) and dN of tokens t of a query head; `row` is their row in contiguous tensors."""
    q = head_rows(q_ptr, q_strides, batch, h, first, t, d, here, d < D)
    f_q = features(q, here[:, None] & (d < D)[None, :], FEATURE)
    do = tl.load(do_ptr + row[:, None] * DV + e[None, :], mask=here[:, None] & (e < DV)[None, :], other=0.0)
    return f_q, do.to(tl.float32) * tl.load(weight_ptr + row, mask=here, other=0.0)[:, None]


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _key_or_value_gradients(
    q_ptr, k_ptr, v_ptr, do_ptr, weight_ptr, unit_ptr, dx_ptr, r_ptr, u_ptr, lost_ptr, cu_ptr,
    q_strides, k_strides, v_strides, T, B,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, FEATURE: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr,
):
    # fmt: on
    """Sums dk (KEYS) or dv of a segment of a key head over the query heads of its group: BLOCK_D or BLOCK_V of its columns."""
    slot, hk = tl.program_id(0), tl.program_id(1)
    b, length, first, start = segment_of(slot, cu_ptr, T, B, PACKED)
    if start >= length:
        return
    batch = b.to(tl.int64)
    d, e, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK)
    if KEYS:
        d += tl.program_id(2) * BLOCK_D
    else:
        e += tl.program_id(2) * BLOCK_V
    lower = n[:, None] >= n[None, :]
    head = (slot if CAUSAL else b).to(tl.int64) * HEADS + hk
    r = state(r_ptr, head, d, e, D, DV, CAUSAL)
    if KEYS:
        r_1 = sum_of_state(u_ptr, head, d, D, DV, CAUSAL)
    careful = False
    if CAUSAL:
        careful = tl.load(lost_ptr + slot * HEADS + hk) != 0
    k_base = k_ptr + batch * k_strides[0] + hk.to(tl.int64) * k_strides[2]
    v_base = v_ptr + batch * v_strides[0] + hk.to(tl.int64) * v_strides[2]
    chunks = tl.cdiv(tl.minimum(SEGMENT, length - start), BLOCK)
    for i in range(0, chunks):
        t = start + (chunks - 1 - i) * BLOCK + n
        here = t < length
        if KEYS:
            own = rows(v_base, first, t, e, here, e < DV, v_strides[1]).to(DOT)
            dx = tl.dot(own, tl.trans(r.to(DOT)), input_precision=PRECISION) + r_1[None, :]
        else:
            own = features(rows(k_base, first, t, d, here, d < D, k_strides[1]), here[:, None] & (d < D)[None, :], FEATURE).to(DOT)
            dx = tl.dot(own, r.to(DOT), input_precision=PRECISION)
        if CAUSAL:
            for g in range(0, GROUP):
                h = hk * GROUP + g
                row = ((0 if PACKED else batch * T) + first + t) * (HEADS * GROUP) + h
                f_q, dn = _queries(q_ptr, do_ptr, weight_ptr, q_strides, batch, first, row, h, t, d, e, here, D, DV, FEATURE)
                # dk: dA and the queries' features; dv: A and dN
                if KEYS:
                    u = tl.load(unit_ptr + row, mask=here, other=0.0)
                    pairs = tl.dot(dn.to(DOT), tl.trans(own), input_precision=PRECISION) + u[:, None]
                    seen = f_q
                else:
                    pairs = tl.dot(f_q.to(DOT), tl.trans(own), input_precision=PRECISION)
                    seen = dn
                pairs = tl.where(lower, pairs, 0.0)
                if careful:
                    # a row with a NaN reaches its own and earlier keys: 0 times NaN must not reach later ones
                    lost = tl.max(is_lost(f_q).to(tl.int32), 1) + tl.max(is_lost(dn).to(tl.int32), 1)
                    if KEYS:
                        lost += is_lost(u).to(tl.int32)
                    dx += lost_after(lost > 0, n)[:, None]
                    seen = tl.where(is_lost(seen), 0.0, seen)
                dx = tl.dot(tl.trans(pairs.to(DOT)), seen.to(DOT), dx, input_precision=PRECISION)
                if GROUP == 1:
                    r = tl.dot(tl.trans(f_q.to(DOT)), dn.to(DOT), r, input_precision=PRECISION)
                    if KEYS:
                        r_1 += tl.sum(f_q * u[:, None], 0)
            if GROUP > 1:
                # every head of the group reads the sums over later chunks alone, so they grow after all have read
                for g in range(0, GROUP):
                    h = hk * GROUP + g
                    row = ((0 if PACKED else batch * T) + first + t) * (HEADS * GROUP) + h
                    f_q, dn = _queries(q_ptr, do_ptr, weight_ptr, q_strides, batch, first, row, h, t, d, e, here, D, DV, FEATURE)
                    if KEYS:
                        u = tl.load(unit_ptr + row, mask=here, other=0.0)
                    r = tl.dot(tl.trans(f_q.to(DOT)), dn.to(DOT), r, input_precision=PRECISION)
                    if KEYS:
                        r_1 += tl.sum(f_q * u[:, None], 0)
        place = ((0 if PACKED else batch * T) + first + t) * HEADS + hk
        if KEYS:
            dx = dx * slope(rows(k_base, first, t, d, here, d < D, k_strides[1]), FEATURE)
            tile, inside = dx_ptr + place[:, None] * D + d[None, :], here[:, None] & (d < D)[None, :]
        else:
            tile, inside = dx_ptr + place[:, None] * DV + e[None, :], here[:, None] & (e < DV)[None, :]
        tl.store(tile, dx.to(dx_ptr.dtype.element_ty), mask=inside)
