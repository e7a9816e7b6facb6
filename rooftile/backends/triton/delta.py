"""D_i = sum_c dO_ic O_ic - dL_i, once a row, before the backward walks.

dL is the gradient that comes in through lse: dS = P (dP - D) then carries it without another term.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.backends.triton.arguments import Call


# fmt: off
@triton.jit(do_not_specialize=["rows", "H", "T"])
def _delta(
    o_ptr, do_ptr, dlse_ptr, delta_ptr,
    do_stride_b, do_stride_t, do_stride_h,
    rows, H, T,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_ROWS: tl.constexpr, DO: tl.constexpr, DLSE: tl.constexpr,
):
    # fmt: on
    # rows are (batch, position, head), as o lies in memory; delta is (batch, head, position)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = row < rows
    h = row % H
    t = row // H % T
    b = row // H // T
    c = tl.arange(0, BLOCK_DV)
    out = (b * H + h) * T + t
    delta = tl.zeros((BLOCK_ROWS,), tl.float32)
    if DO:
        mask = there[:, None] & (c < DV)[None, :]
        o = tl.load(o_ptr + row[:, None] * DV + c[None, :], mask=mask, other=0.0).to(tl.float32)
        do_rows = do_ptr + b * do_stride_b + t * do_stride_t + h * do_stride_h
        do = tl.load(do_rows[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
        delta += tl.sum(o * do, 1)
    if DLSE:
        delta -= tl.load(dlse_ptr + out, mask=there, other=0.0)
    tl.store(delta_ptr + out, delta, mask=there)


def launch(call: Call, o: Tensor, do: Tensor | None, dlse: Tensor | None, do_strides: tuple[int, ...]) -> Tensor:
    """Returns delta, fp32, in the shape of lse."""
    delta = torch.empty(call.rows_shape, dtype=torch.float32, device=o.device)
    block = max(1, 4096 // call.constants["BLOCK_DV"])
    rows = delta.numel()
    if rows:
        _delta[(-(-rows // block),)](
            o, o if do is None else do, delta if dlse is None else dlse, delta, *do_strides, rows, call.H, call.T,
            DV=call.spec.dim_v, BLOCK_DV=call.constants["BLOCK_DV"], BLOCK_ROWS=block, DO=do is not None,
            DLSE=dlse is not None, num_warps=4,
        )  # fmt: skip
    return delta
