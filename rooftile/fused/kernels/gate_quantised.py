"""A gated activation whose rows leave in FP8 or INT8: a program has a whole row, whose largest number is its scale."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.fused.kernels.quantised import out_of, rows_for, store_rows
from rooftile.fused.kernels.tile import warps_for
from rooftile.numerics.activated import activated
from rooftile.numerics.activations import KINDS
from rooftile.runtime.dependent_launch import overlaps, wait_for_inputs
from rooftile.runtime.launch import Kernel


@triton.jit
def _gate_quantised(
    gate_ptr, up_ptr, codes_ptr, scales_ptr, given_ptr, gate_stride, up_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, OUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)[None, :]
    there = n < SIZE
    gate = tl.load(gate_ptr + row * gate_stride + n, mask=there, other=0.0)
    up = tl.load(up_ptr + row * up_stride + n, mask=there, other=0.0)
    opened = activated(gate.to(tl.float32), KIND).to(gate.dtype).to(tl.float32)
    y = (opened * up.to(tl.float32)).to(gate.dtype)
    one = row + tl.arange(0, 1)
    store_rows(y, codes_ptr, row * SIZE + n, scales_ptr + one, given_ptr, there, one >= 0, OUT, False)


_start = Kernel(_gate_quantised)


def quantised(gate: Tensor, up: Tensor, activation: str, format: str, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the codes and scales of a gated activation of (rows, size) twice."""
    gate, up = (x if x.stride(-1) == 1 else x.contiguous() for x in (gate, up))
    codes, scales = rows_for(gate.shape, format, gate.device)
    if codes.numel():
        constants = constants_of(gate.shape[1], activation, out_of(format, given), gate.device)
        arguments = (gate, up, codes, scales, scales if given is None else given, gate.stride(0), up.stride(0))
        _start((gate.shape[0], 1, 1), arguments, constants)
    return codes, scales


@cache
def constants_of(size: int, activation: str, out: str, device: torch.device) -> dict[str, Any]:
    """The compile-time arguments."""
    block = triton.next_power_of_2(size)
    own = {"SIZE": size, "BLOCK": block, "KIND": KINDS[activation], "OUT": out, "num_warps": warps_for(block)}
    return own | overlaps(device)
