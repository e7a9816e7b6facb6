"""The selected and the near branch of one query per sequence: exact attention to the tokens of chosen blocks, and of the window.

A program has the heads of a group and EACH steps of TOKENS tokens, first tokens of the chosen blocks, then of the window. Pages
are read where they lie, through the block table of the branch, and only those.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftile.approximate.native_sparse.decoding_kernels.shape import add_step, parts_of, store_part
from rooftile.exact.backends.triton.scores import LOG2E
from rooftile.runtime.dependent_launch import wait_for_inputs
from rooftile.runtime.launch import Kernel


@triton.jit
def _walk(
    acc, m, l, q, k_ptr, v_ptr, table_ptr, starts_ptr, first, begin, length, k_strides, v_strides, scale,
    IS_NEAR: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """EACH steps from step `first`; no token before `begin` is seen. The near branch counts its steps from the first one seen."""
    s, d, dv = tl.arange(0, SHAPE.TOKENS), tl.arange(0, SHAPE.BLOCK_D), tl.arange(0, SHAPE.BLOCK_DV)
    PER: tl.constexpr = SHAPE.BLOCK // SHAPE.TOKENS
    for n in range(SHAPE.EACH):
        step = first + n
        if IS_NEAR:
            j = begin // SHAPE.TOKENS * SHAPE.TOKENS + step * SHAPE.TOKENS + s
            seen = (j >= begin) & (j < length)
        else:
            block = tl.load(starts_ptr + step // PER, mask=step < SHAPE.COUNT * PER, other=-1)
            j = block * SHAPE.BLOCK + step % PER * SHAPE.TOKENS + s
            seen = (block >= 0) & (j < length)
        page = tl.load(table_ptr + j // SHAPE.SIZE, mask=seen, other=0).to(tl.int64)
        line = j % SHAPE.SIZE
        k_tile = k_ptr + (page * k_strides[0] + line * k_strides[1])[:, None] + d[None, :]
        v_tile = v_ptr + (page * v_strides[0] + line * v_strides[1])[:, None] + dv[None, :]
        k = tl.load(k_tile, mask=seen[:, None] & (d < SHAPE.D)[None, :], other=0.0)
        v = tl.load(v_tile, mask=seen[:, None] & (dv < SHAPE.DV)[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=SHAPE.PRECISION) * (scale * LOG2E)
        x = tl.where(seen[None, :], x, float("-inf"))
        acc, m, l, _, _ = add_step(acc, m, l, x, v, SHAPE)
    return acc, m, l


@triton.jit(
    do_not_specialize=["H", "PARTS"],
    do_not_specialize_on_alignment=["table_ptr", "near_table_ptr", "lengths_ptr"],
)
def _decode_tokens(
    q_ptr, k_ptr, v_ptr, near_k_ptr, near_v_ptr, table_ptr, near_table_ptr, lengths_ptr, chosen_ptr, acc_ptr, top_ptr, total_ptr,
    q_strides, k_strides, v_strides, near_k_strides, near_v_strides, table_stride, near_table_stride, H, PARTS, scale,
    SHAPE: tl.constexpr,
):  # fmt: skip
    if SHAPE.PDL:
        wait_for_inputs()
    ROWS: tl.constexpr = SHAPE.ROWS
    BLOCK_DV: tl.constexpr = SHAPE.BLOCK_DV
    part, hk, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + b)
    g, d = tl.arange(0, ROWS), tl.arange(0, SHAPE.BLOCK_D)
    h = hk * SHAPE.GROUP + g
    here = g < SHAPE.GROUP
    q_tile = q_ptr + b * q_strides[0] + h[:, None] * q_strides[1] + d[None, :]
    q = tl.load(q_tile, mask=here[:, None] & (d < SHAPE.D)[None, :], other=0.0)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    starts_ptr = chosen_ptr + (b * (H // SHAPE.GROUP) + hk) * SHAPE.COUNT
    if part < SHAPE.CHOSEN:
        acc, m, l = _walk(
            acc, m, l, q, k_ptr + hk * k_strides[2], v_ptr + hk * v_strides[2], table_ptr + b * table_stride, starts_ptr,
            part * SHAPE.EACH, 0, length, k_strides, v_strides, scale, False, SHAPE,
        )  # fmt: skip
    else:
        begin = tl.maximum(length - SHAPE.WINDOW, 0)
        acc, m, l = _walk(
            acc, m, l, q, near_k_ptr + hk * near_k_strides[2], near_v_ptr + hk * near_v_strides[2],
            near_table_ptr + b * near_table_stride, starts_ptr, (part - SHAPE.CHOSEN) * SHAPE.EACH, begin, length, near_k_strides,
            near_v_strides, scale, True, SHAPE,
        )  # fmt: skip
    store_part(acc_ptr, top_ptr, total_ptr, acc, m, l, (b * H + h) * PARTS + SHAPE.SPLITS + part, here, SHAPE)


_start = Kernel(_decode_tokens)


def launch(q, k, v, near_k, near_v, table, near_table, lengths, chosen, parts, shape, constants, scale) -> None:
    """Writes the parts of the selected and the near branch of each row."""
    (B, H, _), Hk = q.shape, k.shape[2]
    strides = (q.stride()[:2], *(x.stride()[:3] for x in (k, v, near_k, near_v)))
    numbers = (*strides, table.stride(0), near_table.stride(0), H, parts_of(shape), scale)
    tensors = (q, k, v, near_k, near_v, table, near_table, lengths, chosen, *parts)
    _start((shape.CHOSEN + shape.NEAR, Hk, B), (*tensors, *numbers), constants)
