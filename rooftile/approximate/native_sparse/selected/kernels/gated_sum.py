"""The gated sum of three branches: each number is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.runtime.launch import Kernel

# numbers of a program
NUMBERS = 2048


@triton.jit(do_not_specialize=["total"])
def _sum(a_ptr, b_ptr, c_ptr, gates_ptr, o_ptr, total, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    there = (row < total)[:, None] & (d < D)[None, :]
    place = row[:, None] * D + d[None, :]
    first = tl.load(gates_ptr + row * 3, mask=row < total, other=0.0).to(tl.float32)
    second = tl.load(gates_ptr + row * 3 + 1, mask=row < total, other=0.0).to(tl.float32)
    third = tl.load(gates_ptr + row * 3 + 2, mask=row < total, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + place, mask=there, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + place, mask=there, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + place, mask=there, other=0.0).to(tl.float32)
    o = a * first[:, None] + b * second[:, None] + c * third[:, None]
    tl.store(o_ptr + place, o.to(o_ptr.dtype.element_ty), mask=there)


@triton.jit
def _one_gradient(do, x_ptr, gates_ptr, dx_ptr, dgates_ptr, place, row, there, here):
    gate = tl.load(gates_ptr + row * 3, mask=here, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + place, mask=there, other=0.0).to(tl.float32)
    tl.store(dx_ptr + place, (do * gate[:, None]).to(dx_ptr.dtype.element_ty), mask=there)
    tl.store(dgates_ptr + row * 3, tl.sum(do * x, 1).to(dgates_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["total"])
def _gradients(
    do_ptr, a_ptr, b_ptr, c_ptr, gates_ptr, da_ptr, db_ptr, dc_ptr, dgates_ptr, total, D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    here = row < total
    there = here[:, None] & (d < D)[None, :]
    place = row[:, None] * D + d[None, :]
    do = tl.load(do_ptr + place, mask=there, other=0.0).to(tl.float32)
    _one_gradient(do, a_ptr, gates_ptr, da_ptr, dgates_ptr, place, row, there, here)
    _one_gradient(do, b_ptr, gates_ptr + 1, db_ptr, dgates_ptr + 1, place, row, there, here)
    _one_gradient(do, c_ptr, gates_ptr + 2, dc_ptr, dgates_ptr + 2, place, row, there, here)


_start, _start_gradients = Kernel(_sum), Kernel(_gradients)


def forward(a: Tensor, b: Tensor, c: Tensor, gates: Tensor) -> Tensor:
    """The sum of contiguous branches (..., D) times gates (..., 3)."""
    o = torch.empty_like(a)
    if o.numel():
        grid, constants = _shape(a)
        _start(grid, (a, b, c, gates, o, a.numel() // a.shape[-1]), constants)
    return o


def backward(do: Tensor, a: Tensor, b: Tensor, c: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of contiguous branches and gates."""
    made = torch.empty_like(a), torch.empty_like(b), torch.empty_like(c), torch.empty_like(gates)
    if a.numel():
        grid, constants = _shape(a)
        _start_gradients(grid, (do, a, b, c, gates, *made, a.numel() // a.shape[-1]), constants)
    return made


def _shape(a: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    D = a.shape[-1]
    block = max(triton.next_power_of_2(D), 16)
    rows = max(NUMBERS // block, 1)
    return (triton.cdiv(a.numel() // D, rows), 1, 1), {"D": D, "ROWS": rows, "BLOCK_D": block, "num_warps": 4}
