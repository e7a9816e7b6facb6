"""Attention of one query per sequence to the compressed keys in its pages, and the sums that the choice of blocks needs.

A program has the heads of a group and a share of the steps of one sequence. A step covers NEW blocks of tokens, and the compressed
keys that begin in them. Each key and value is read once, where it lies:

    X = scale Q C_j^T      P = exp(X - m)     O += P V_j     inside of b = sum_j inside(j) P_j     beyond b = sum_j beyond(j) P_j

over the j that begin in block b, which reach over some strides of it, and some of the next (a compressed key is no longer
than a block). The score of block b is its own inside and the beyond of the one before. Sums are relative to the largest score so
far, which is stored beside them; the choice puts them together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.approximate.native_sparse.decoding_kernels.shape import add_step, parts_of, store_part
from rooftile.exact.backends.triton.scores import LOG2E
from rooftile.runtime.dependent_launch import wait_for_inputs
from rooftile.runtime.launch import Kernel


@triton.jit(do_not_specialize=["H", "STEPS", "PARTS"], do_not_specialize_on_alignment=["table_ptr", "lengths_ptr"])
def _decode_compressed(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, acc_ptr, top_ptr, total_ptr, sums_ptr, reference_ptr,
    q_strides, k_strides, v_strides, table_stride, H, STEPS, PARTS, scale, SHAPE: tl.constexpr,
):  # fmt: skip
    if SHAPE.PDL:
        wait_for_inputs()
    ROWS: tl.constexpr = SHAPE.ROWS
    KEYS: tl.constexpr = SHAPE.KEYS
    NEW: tl.constexpr = SHAPE.NEW
    PADDED: tl.constexpr = SHAPE.PADDED
    BLOCK_DV: tl.constexpr = SHAPE.BLOCK_DV
    SKIP: tl.constexpr = SHAPE.LENGTH // SHAPE.STRIDE - 1
    split, hk, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + b)
    g, d, dv = tl.arange(0, ROWS), tl.arange(0, SHAPE.BLOCK_D), tl.arange(0, SHAPE.BLOCK_DV)
    h = hk * SHAPE.GROUP + g
    here = g < SHAPE.GROUP
    q_tile = q_ptr + b * q_strides[0] + h[:, None] * q_strides[1] + d[None, :]
    q = tl.load(q_tile, mask=here[:, None] & (d < SHAPE.D)[None, :], other=0.0)
    # key `at` of a step begins in its n-th block, at stride r of it
    at, n = tl.arange(0, KEYS), tl.arange(0, NEW)
    r = at % SHAPE.PADDED
    inside = tl.minimum(SHAPE.RATIO - r, SKIP + 1).to(tl.float32)
    beyond = (SKIP + 1) - inside
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    steps = tl.cdiv(tl.cdiv(length, SHAPE.BLOCK), SHAPE.NEW)
    per = tl.cdiv(steps, SHAPE.SPLITS)
    for step in range(split * per, tl.minimum(steps, (split + 1) * per)):
        c = (step * NEW + at // PADDED) * SHAPE.RATIO + r
        seen = (r < SHAPE.RATIO) & (c * SHAPE.STRIDE + (SHAPE.LENGTH - 1) < length)
        row = c + SKIP
        page = tl.load(table_ptr + b * table_stride + row // SHAPE.PAGE_ROWS, mask=seen, other=0).to(tl.int64)
        line = row % SHAPE.PAGE_ROWS
        k_tile = k_ptr + (page * k_strides[0] + line * k_strides[1] + hk * k_strides[2])[:, None] + d[None, :]
        v_tile = v_ptr + (page * v_strides[0] + line * v_strides[1] + hk * v_strides[2])[:, None] + dv[None, :]
        k = tl.load(k_tile, mask=seen[:, None] & (d < SHAPE.D)[None, :], other=0.0)
        v = tl.load(v_tile, mask=seen[:, None] & (dv < SHAPE.DV)[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=SHAPE.PRECISION) * (scale * LOG2E)
        x = tl.where(seen[None, :], x, float("-inf"))
        acc, m, l, p, reference = add_step(acc, m, l, x, v, SHAPE)
        place = (b * H + h) * STEPS + step
        tl.store(reference_ptr + place, reference, mask=here)
        sums = sums_ptr + place[:, None] * (2 * NEW) + n[None, :]
        tl.store(sums, tl.sum(tl.reshape(p * inside[None, :], (ROWS, NEW, PADDED)), 2), mask=here[:, None])
        tl.store(sums + NEW, tl.sum(tl.reshape(p * beyond[None, :], (ROWS, NEW, PADDED)), 2), mask=here[:, None])
    store_part(acc_ptr, top_ptr, total_ptr, acc, m, l, (b * H + h) * PARTS + split, here, SHAPE)


_start = Kernel(_decode_compressed)


def launch(q, k, v, table, lengths, parts, sums, reference, shape, constants, scale) -> None:
    """Writes the first SPLITS parts of each row; and per step the sums of its blocks (B, H, STEPS, 2, NEW), and their reference."""
    (B, H, _), Hk, STEPS = q.shape, k.shape[2], sums.shape[2]
    numbers = (q.stride()[:2], k.stride()[:3], v.stride()[:3], table.stride(0), H, STEPS, parts_of(shape), scale)
    _start((shape.SPLITS, Hk, B), (q, k, v, table, lengths, *parts, sums, reference, *numbers), constants)
