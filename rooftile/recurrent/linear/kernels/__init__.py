"""The recurrence in Triton kernels, for Ampere and newer: head dims up to 128.

    states       the state that each segment starts from; features of the head's own dimensions
    outputs      each segment walked from its state
    gradients    the same for gradients
    by_features  exponential features of a projection, which have a running largest: their launches
    exponents, exponential, exponential_gradients   their kernels
    tiles        what they share

Every sum has one owner and one order: results are the same bits from run to run, and no sequence knows its neighbours.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.recurrent.linear.by_chunks import RunningSums
from rooftile.recurrent.linear.kernels import by_features
from rooftile.recurrent.linear.kernels.gradients import _key_or_value_gradients, _query_gradients, row_gradients
from rooftile.recurrent.linear.kernels.outputs import _outputs
from rooftile.recurrent.linear.kernels.states import _scan, _segment_sums
from rooftile.recurrent.linear.kernels.tiles import SEGMENT, is_hopper
from rooftile.recurrent.linear.problem import Recurrence
from rooftile.runtime.launch import Kernel

LARGEST_DIM = 128
# numbers of a state that a program of the scan carries
_SCANNED = 1024

_start_sums, _start_scan, _start_outputs = Kernel(_segment_sums), Kernel(_scan), Kernel(_outputs)
_start_queries, _start_keys_or_values = Kernel(_query_gradients), Kernel(_key_or_value_gradients)


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


class _Call:
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


def forward(
    q: Tensor, k: Tensor, v: Tensor, state: RunningSums, projection: Tensor | None, cu: Tensor | None, problem: Recurrence
) -> tuple[Tensor, Tensor, RunningSums]:
    """o (B, T, H, Dv) in the dtype of q, the sums of weights (B, T, H), and the last state."""
    if projection is not None:
        return by_features.forward(q, k, v, state, projection, cu, problem)
    q, k, v = (_readable(x) for x in (q, k, v))
    call = _Call(q, k, v, cu, problem)
    o = torch.empty((*q.shape[:-1], call.dim_v), dtype=q.dtype, device=q.device)
    den = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    part, lost, last = call.states(k, v, None, None, state, False)
    slots = call.slots(call.T)
    if slots and o.numel():
        constants = call.constants("outputs", FEATURE=problem.feature, CAUSAL=problem.causal, NORMALISE=problem.normalise)
        s, z = call.starts(part, last)
        arguments = (
            q, k, v, o, den, s, z, lost, call.cu, call.strides(q), call.strides(k), call.strides(v), call.T, call.B,
        )  # fmt: skip
        _start_outputs((slots, call.H, triton.cdiv(call.dim_v, constants["BLOCK_V"])), arguments, constants)
    return o, den, last


def backward(
    do: Tensor, d_last: RunningSums, o: Tensor, den: Tensor, q: Tensor, k: Tensor, v: Tensor, state: RunningSums,
    projection: Tensor | None, cu: Tensor | None, problem: Recurrence,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, S and z."""
    if projection is not None:
        return by_features.backward(do, d_last, o, den, q, k, v, state, projection, cu, problem)
    q, k, v = (_readable(x) for x in (q, k, v))
    do, o, den = do.contiguous(), o.contiguous(), den.contiguous()
    call = _Call(q, k, v, cu, problem)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    weight, unit = row_gradients(do, o, den) if problem.normalise else (torch.ones_like(den), torch.zeros_like(den))
    past, lost_k, last = call.states(k, v, None, None, state, False)
    later, lost_q, first = call.states(q, do, weight, unit, RunningSums(d_last.s, d_last.z, state.largest), True)
    strides = (call.strides(q), call.strides(k), call.strides(v))
    options = {"FEATURE": problem.feature, "CAUSAL": problem.causal}
    slots, slots_k = call.slots(call.T), call.slots(call.S)
    if slots and dq.numel():
        constants = call.constants("queries", **options)
        arguments = (q, k, v, do, weight, unit, dq, *call.starts(past, last), lost_k, call.cu, *strides, call.T, call.B)
        _start_queries((slots, call.H, triton.cdiv(call.dim, constants["BLOCK_D"])), arguments, constants)
    if slots_k and dk.numel():
        starts = (*call.starts(later, first), lost_q, call.cu, *strides, call.S, call.B)
        for kernel, dx, width, block in (("keys", dk, call.dim, "BLOCK_D"), ("values", dv, call.dim_v, "BLOCK_V")):
            constants = call.constants(kernel, KEYS=kernel == "keys", **options)
            grid = (slots_k, call.Hk, triton.cdiv(width, constants[block]))
            _start_keys_or_values(grid, (q, k, v, do, weight, unit, dx, *starts), constants)
    return dq, dk, dv, first.s, first.z


def _readable(x: Tensor) -> Tensor:
    """x with its last axis in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()
