"""The sums that the backward takes from each row: delta_i = sum_c do_ic o_ic - dlse_i, and 0 for a row that sees nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.runtime.launch import Kernel

ROWS = 32


@triton.jit(do_not_specialize=["total"])
def _deltas(o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, total, DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_DV)
    there = row < total
    tile = row[:, None] * DV + d[None, :]
    here = there[:, None] & (d < DV)[None, :]
    o = tl.load(o_ptr + tile, mask=here, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + tile, mask=here, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + row, mask=there, other=float("-inf"))
    delta = tl.sum(o * do, 1) - tl.load(dlse_ptr + row, mask=there, other=0.0)
    # such a row has an output of 0, whatever do holds
    tl.store(delta_ptr + row, tl.where(lse == float("-inf"), 0.0, delta), mask=there)


_start = Kernel(_deltas)


def deltas(o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor) -> Tensor:
    """Returns delta (total, H) in fp32 from contiguous o and do (total, H, Dv), lse and dlse (total, H) in fp32."""
    found = torch.empty_like(lse)
    if found.numel():
        DV = o.shape[-1]
        constants = {"DV": DV, "BLOCK_DV": triton.next_power_of_2(DV), "ROWS": ROWS, "num_warps": 4}
        _start((triton.cdiv(lse.numel(), ROWS), 1, 1), (o, do, lse, dlse, found, lse.numel()), constants)
    return found
