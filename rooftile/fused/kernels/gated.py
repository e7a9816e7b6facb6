"""A gated activation in one pass: `rooftile.fused.gated` defines it, and this rounds where it rounds."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.fused.kernels.tile import PIECE, warps_for
from rooftile.numerics.activated import activated
from rooftile.numerics.activations import KINDS
from rooftile.runtime.dependent_launch import overlaps, wait_for_inputs
from rooftile.runtime.launch import Kernel


@triton.jit
def _gate(x_ptr, o_ptr, FFN: tl.constexpr, PIECE: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    """Writes a piece of a row: the activation of its gate, rounded, times the other half."""
    if PDL:
        wait_for_inputs()
    pieces: tl.constexpr = (FFN + PIECE - 1) // PIECE
    row = (tl.program_id(0) // pieces).to(tl.int64)
    n = tl.program_id(0) % pieces * PIECE + tl.arange(0, PIECE)
    gate = tl.load(x_ptr + row * (2 * FFN) + n, mask=n < FFN, other=0.0)
    up = tl.load(x_ptr + row * (2 * FFN) + FFN + n, mask=n < FFN, other=0.0)
    opened = activated(gate.to(tl.float32), KIND).to(gate.dtype).to(tl.float32)
    tl.store(o_ptr + row * FFN + n, (opened * up.to(tl.float32)).to(gate.dtype), mask=n < FFN)


_start_gate = Kernel(_gate)


def gated(x: Tensor, activation: str) -> Tensor:
    """Activation of the first half of each row times the second: x (total, 2 * ffn) to (total, ffn)."""
    x = x.contiguous()
    total, ffn = x.shape[0], x.shape[1] // 2
    o = torch.empty((total, ffn), dtype=x.dtype, device=x.device)
    piece = min(PIECE, triton.next_power_of_2(ffn))
    if total:
        _start_gate((total * triton.cdiv(ffn, piece), 1, 1), (x, o), _constants(ffn, piece, activation, x.device))
    return o


@cache
def _constants(ffn: int, piece: int, activation: str, device: torch.device) -> dict[str, Any]:
    return {"FFN": ffn, "PIECE": piece, "KIND": KINDS[activation], "num_warps": warps_for(piece)} | overlaps(device)
