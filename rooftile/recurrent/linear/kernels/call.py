"""The sizes and tiles of a call with features of the head's own dimensions, and the states that its segments start from."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.recurrent.linear.by_chunks import RunningSums
from rooftile.recurrent.linear.kernels.states import _scan, _segment_sums
from rooftile.recurrent.linear.kernels.tiles import SEGMENT, is_hopper
from rooftile.recurrent.linear.problem import Recurrence
from rooftile.runtime.launch import Kernel

# numbers of a state that a program of the scan carries
_SCANNED = 1024

_start_sums, _start_scan = Kernel(_segment_sums), Kernel(_scan)


# the most that spills nothing, as compiled by Triton 3.6 for sm80 and sm90: tokens, columns, stages
_TILES = {
    (torch.bfloat16, True): (64, 64, 2),
    (torch.bfloat16, False): (32, 64, 2),
    (torch.float16, True): (32, 32, 2),
    (torch.float16, False): (32, 32, 2),
    (torch.float32, True): (16, 16, 1),
    (torch.float32, False): (16, 16, 1),
}


def tile_of(kernel: str, dim: int, dim_v: int, dtype: torch.dtype, hopper: bool, grouped: bool) -> dict[str, Any]:
    """Tokens and columns of a tile, how its products are made, and warps.

    The kernels "outputs" and "values" own this many columns of values at a time, "queries" and "keys" of features.
    """
    block_d, block_v = (max(triton.next_power_of_2(n), 16) for n in (dim, dim_v))
    # bf16 has the range of sums over a long text; fp16 has not, so its products are of tf32, as exact as fp16
    dot = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
    precision = "ieee" if dtype == torch.float32 else "tf32"
    block, split, stages = _TILES[dtype, hopper]
    if grouped and kernel in ("sums", "keys", "values"):
        # the loop over a group's heads holds more at once
        block, split = min(block, 32), min(split, 32)
    if kernel in ("outputs", "values"):
        block_v = min(block_v, split)
    elif kernel in ("queries", "keys"):
        block_d = min(block_d, split)
    return {
        "BLOCK": block, "BLOCK_D": block_d, "BLOCK_V": block_v, "DOT": dot, "PRECISION": precision,
        "num_warps": 8, "num_stages": stages,
    }  # fmt: skip


@cache
def _constants(
    kernel: str, dim: int, dim_v: int, dtype: torch.dtype, hopper: bool, heads: int, group: int, packed: bool, **own: Any
) -> dict[str, Any]:
    """One dictionary for the same arguments: a launch is recognised by it."""
    shape = {"HEADS": heads, "GROUP": group, "D": dim, "DV": dim_v, "PACKED": packed}
    return shape | own | tile_of(kernel, dim, dim_v, dtype, hopper, group > 1)


@cache
def _scan_constants(dim: int, dim_v: int, heads: int, packed: bool, reverse: bool) -> dict[str, Any]:
    return {
        "HEADS": heads, "SUMS": dim * dim_v, "D": dim, "BLOCK": _SCANNED, "REVERSE": reverse, "PACKED": packed, "num_warps": 4,
    }  # fmt: skip


class Call:
    """The sizes of a call, and the parts of its launches that do not differ."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, problem: Recurrence) -> None:
        self.problem, self.packed = problem, cu is not None
        self.dim, self.dim_v, self.dtype = q.shape[-1], v.shape[-1], q.dtype
        self.H, self.Hk = q.shape[-2], k.shape[-2]
        self.B = q.shape[0] if cu is None else cu.shape[0] - 1
        self.T, self.S = q.shape[-3], k.shape[-3]
        # any tensor stands for the offsets of calls that are not packed
        self.cu = k if cu is None else cu
        self.device = q.device

    def slots(self, length: int) -> int:
        size = SEGMENT.value
        return length // size + self.B if self.packed else -(-length // size) * self.B

    def constants(self, kernel: str, group: int | None = None, **own: Any) -> dict[str, Any]:
        group = self.H // self.Hk if group is None else group
        hopper = is_hopper(self.device)
        return _constants(kernel, self.dim, self.dim_v, self.dtype, hopper, self.Hk, group, self.packed, **own)

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        return (0, x.stride(0), x.stride(1)) if self.packed else (x.stride(0), x.stride(1), x.stride(2))

    def states(
        self, x: Tensor, y: Tensor, weight: Tensor | None, unit: Tensor | None, first: RunningSums, reverse: bool
    ) -> tuple[Tensor, Tensor, RunningSums]:
        """The state that each segment starts from, S before z; whether a segment has lost numbers; and the last state."""
        length, size = x.shape[-3], self.dim * self.dim_v + self.dim
        slots = self.slots(length)
        part = torch.empty((slots, self.Hk, size), dtype=torch.float32, device=self.device)
        lost = torch.empty((slots, self.Hk), dtype=torch.int32, device=self.device)
        last = RunningSums(torch.empty_like(first.s), torch.empty_like(first.z), first.largest)
        s, z = first.s.contiguous(), first.z.contiguous()
        if slots and self.B:
            # backward, all query heads of a group join one state
            group = 1 if weight is None else None
            constants = self.constants("sums", group, FEATURE=self.problem.feature, WEIGHTED=weight is not None)
            arguments = (
                x, y, part if weight is None else weight, part if unit is None else unit, part, lost, self.cu,
                self.strides(x), self.strides(y), length, self.B,
            )  # fmt: skip
            _start_sums((slots, self.Hk, 1), arguments, constants)
        if self.B:
            scanned = (part, s, z, last.s, last.z, self.cu, length, self.B)
            constants = _scan_constants(self.dim, self.dim_v, self.Hk, self.packed, reverse)
            _start_scan((-(-size // _SCANNED), self.B, self.Hk), scanned, constants)
        return part, lost, last

    def starts(self, part: Tensor, last: RunningSums) -> tuple[Tensor, Tensor]:
        """S and z as a walk reads them: of its segment, or of the whole sequence."""
        if self.problem.causal:
            return part, part.flatten()[self.dim * self.dim_v :]
        return last.s, last.z


def readable(x: Tensor) -> Tensor:
    """x with its last axis in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()
