"""The recurrence of exponential features (Performer's positive ones) in Triton kernels: what is launched, and in which tiles.

There is a state for each chunk, so no kernel walks from chunk to chunk but the scan, and each loops over BLOCK_F features at a time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.recurrent.linear.by_chunks import RunningSums
from rooftile.recurrent.linear.kernels.exponential import _exponential_outputs, _exponential_scan, _exponential_sums
from rooftile.recurrent.linear.kernels.exponential_gradients import _exponential_keys, _exponential_queries, _exponential_values
from rooftile.recurrent.linear.kernels.exponents import _exponents
from rooftile.recurrent.linear.kernels.gradients import row_gradients
from rooftile.recurrent.linear.kernels.tiles import is_hopper
from rooftile.recurrent.linear.problem import Recurrence
from rooftile.runtime.launch import Kernel

# numbers of a state that a program of the scan carries
_SCANNED = 1024

_start_exponents, _start_sums, _start_scan = Kernel(_exponents), Kernel(_exponential_sums), Kernel(_exponential_scan)
_start_outputs = Kernel(_exponential_outputs)
_start_queries, _start_keys, _start_values = map(Kernel, (_exponential_queries, _exponential_keys, _exponential_values))

# tokens of a chunk, features at a time and stages: for heads up to 64 wide, and for wider ones. Larger chunks have fewer states
# to write and read, and products of 64 rows run on wgmma; as compiled by Triton 3.6, larger ones spill in their loops.
_TILES = {
    (torch.bfloat16, True): ((128, 64, 2), (128, 32, 2)),
    (torch.bfloat16, False): ((64, 32, 2), (32, 32, 2)),
    (torch.float16, True): ((64, 32, 1), (64, 32, 1)),
    (torch.float16, False): ((64, 32, 1), (32, 16, 1)),
    (torch.float32, True): ((32, 16, 1), (32, 16, 1)),
    (torch.float32, False): ((32, 16, 1), (32, 16, 1)),
}  # fmt: skip


def tile_of(kernel: str, dim: int, dim_v: int, F: int, dtype: torch.dtype, hopper: bool) -> dict[str, Any]:
    """Tokens, columns and features of a tile, how its products are made, and warps."""
    chunk, split, stages = _TILES[dtype, hopper][max(dim, dim_v) > 64]
    block_d, block_v, block_f = (max(triton.next_power_of_2(n), 16) for n in (dim, dim_v, F))
    return {
        "BLOCK": chunk, "BLOCK_D": block_d, "BLOCK_V": block_v, "BLOCK_F": min(block_f, split),
        # the range of fp16 is too small for sums, and tf32 is as exact
        "DOT": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": 8, "num_stages": stages,
    }  # fmt: skip


@cache
def _constants(
    kernel: str, dim: int, dim_v: int, F: int, dtype: torch.dtype, hopper: bool, names: tuple[tuple[str, Any], ...]
) -> dict[str, Any]:
    """One dictionary for the same arguments: a launch is recognised by it."""
    found = {"D": dim, "DV": dim_v, "F": F, **tile_of(kernel, dim, dim_v, F, dtype, hopper), **dict(names)}
    if kernel == "exponents":
        for word in ("DV", "BLOCK_V", "DOT", "PRECISION"):
            del found[word]
    return found


@cache
def _scan_constants(F: int, dim_v: int, heads: int, chunk: int, packed: bool, causal: bool, reverse: bool) -> dict[str, Any]:
    return {
        "HEADS": heads, "SUMS": F * dim_v, "F": F, "CHUNK": chunk, "BLOCK": _SCANNED, "REVERSE": reverse, "CAUSAL": causal,
        "PACKED": packed, "num_warps": 4,
    }  # fmt: skip


def _dtype_of_states(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


class Call:
    """The sizes of a call, the largest exponents of its tokens, and the states of its chunks."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, state: RunningSums, w: Tensor, cu: Tensor | None, problem: Recurrence
    ) -> None:  # fmt: skip
        self.q, self.k, self.v, self.causal = q, k, v, problem.causal
        self.packed, self.root = cu is not None, problem.scale**0.5
        # W as the sum of two numbers in the dtype of q
        w = w.to(torch.float32).contiguous()
        self.w = w.to(q.dtype)
        self.rest = (w - self.w).to(q.dtype)
        self.F, self.dim, self.dim_v, self.dtype = w.shape[0], q.shape[-1], v.shape[-1], q.dtype
        self.H, self.Hk = q.shape[-2], k.shape[-2]
        self.B = q.shape[0] if cu is None else cu.shape[0] - 1
        self.T, self.S = q.shape[-3], k.shape[-3]
        # any tensor stands for the offsets of calls that are not packed
        self.cu = k if cu is None else cu
        self.hopper = is_hopper(q.device)
        self.chunk = _TILES[q.dtype, self.hopper][max(self.dim, self.dim_v) > 64][0]
        self.slots_q, self.slots_k = self.slots(self.T), self.slots(self.S)
        self.top_q, _, _ = self.exponents(q, self.slots_q, False)
        self.top_k, self.m, self.running = self.exponents(k, self.slots_k, True)
        self.before, self.peak = self.new(self.slots_k, self.Hk), self.new(self.slots_k, self.Hk)
        self.starts, self.last = self.scan(self.sums(k, v, self.slots_k, None, None), state, self.S, False)

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)

    def slots(self, length: int) -> int:
        return length // self.chunk + self.B if self.packed else -(-length // self.chunk) * self.B

    def constants(self, kernel: str, **own: Any) -> dict[str, Any]:
        names = tuple(({"HEADS": self.Hk, "PACKED": self.packed} | own).items())
        return _constants(kernel, self.dim, self.dim_v, self.F, self.dtype, self.hopper, names)

    def options(self, kernel: str, **own: Any) -> dict[str, Any]:
        return self.constants(kernel, **({"GROUP": self.H // self.Hk, "CAUSAL": self.causal} | own))

    def strides(self, *given: Tensor) -> list[tuple[int, ...]]:
        """(batch, position, head) of each."""
        return [(0, *x.stride()[:2]) if self.packed else x.stride()[:3] for x in given]

    def exponents(self, x: Tensor, slots: int, keys: bool) -> tuple[Tensor, Tensor, Tensor]:
        top = self.new(*x.shape[:-1])
        m, running = (torch.empty_like(top), torch.empty_like(top)) if keys else (top, top)
        if slots and x.shape[-2]:
            constants = self.constants("exponents", HEADS=x.shape[-2], KEYS=keys)
            arguments = (x, self.w, self.rest, top, m, running, self.cu, *self.strides(x), self.root, x.shape[-3], self.B)
            _start_exponents((slots, x.shape[-2], 1), arguments, constants)
        return top, m, running

    def sums(self, x: Tensor, y: Tensor, slots: int, weight: Tensor | None, unit: Tensor | None) -> Tensor:
        """The sum of each chunk, S before z."""
        part = self.new(slots, self.Hk, self.F * self.dim_v + self.F)
        if slots and self.Hk:
            weighted = weight is not None
            constants = self.options("sums", WEIGHTED=weighted, **({} if weighted else {"GROUP": 1}))
            arguments = (
                x, y, self.w, self.rest, self.top_q if weighted else self.top_k, self.m, self.running, self.before,
                part if weight is None else weight, part if unit is None else unit, part, self.peak, self.cu,
                *self.strides(x, y), self.root, x.shape[-3], self.B,
            )  # fmt: skip
            _start_sums((slots, self.Hk, triton.cdiv(self.F, constants["BLOCK_F"])), arguments, constants)
        return part

    def scan(self, part: Tensor, first: RunningSums, length: int, reverse: bool) -> tuple[tuple[Tensor, Tensor], RunningSums]:
        """S and z as a chunk reads them, its own or the whole sequence's; and the last state."""
        s, z, largest = (x.contiguous() for x in first)
        last = RunningSums(torch.empty_like(s), torch.empty_like(z), torch.empty_like(largest))
        # their products round S to bf16 in any case
        before_s = part.new_empty((*part.shape[:2], self.F * self.dim_v), dtype=_dtype_of_states(self.dtype))
        before_z = self.new(*part.shape[:2], self.F)
        if self.B and self.Hk:
            constants = _scan_constants(self.F, self.dim_v, self.Hk, self.chunk, self.packed, self.causal, reverse)
            arguments = (part, self.peak, self.before, before_s, before_z, s, z, largest, *last, self.cu, length, self.B)
            size = self.F * self.dim_v + self.F
            _start_scan((triton.cdiv(size, _SCANNED), self.B, self.Hk), arguments, constants)
        return ((before_s, before_z) if self.causal else (last.s.to(before_s.dtype), last.z)), last


def forward(
    q: Tensor, k: Tensor, v: Tensor, state: RunningSums, projection: Tensor, cu: Tensor | None, problem: Recurrence
) -> tuple[Tensor, Tensor, RunningSums]:
    """o (B, T, H, Dv) in the dtype of q, the sums of weights (B, T, H), and the last state."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    call = Call(q, k, v, state, projection, cu, problem)
    o = torch.empty((*q.shape[:-1], call.dim_v), dtype=q.dtype, device=q.device)
    den = call.new(*q.shape[:-1])
    if call.slots_q and o.numel():
        arguments = (
            q, k, v, call.w, call.rest, o, den, call.top_q, call.top_k, call.m, call.running, call.before,
            *call.starts, call.cu, *call.strides(q, k, v), call.root, call.T, call.B,
        )  # fmt: skip
        _start_outputs((call.slots_q, call.H, 1), arguments, call.options("outputs"))
    return o, den, call.last


def backward(
    do: Tensor, d_last: RunningSums, o: Tensor, den: Tensor, q: Tensor, k: Tensor, v: Tensor, state: RunningSums, projection: Tensor,
    cu: Tensor | None, problem: Recurrence,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, S and z."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    do, o, den = do.contiguous(), o.contiguous(), den.contiguous()
    call = Call(q, k, v, state, projection, cu, problem)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    weight, unit = row_gradients(do, o, den)
    later = call.sums(q, do, call.slots_q, weight, unit)
    starts, first = call.scan(later, RunningSums(d_last.s, d_last.z, state.largest), call.T, True)
    scalars = (call.root, call.T, call.B)
    exponents = (call.top_q, call.top_k, call.m, call.running, call.before)
    if call.slots_q and dq.numel():
        arguments = (
            q, k, v, call.w, call.rest, do, weight, unit, dq, *exponents, *call.starts, call.cu,
            *call.strides(q, k, v), *scalars,
        )  # fmt: skip
        _start_queries((call.slots_q, call.H, 1), arguments, call.options("queries"))
    r, r_1 = starts
    scalars = (call.root, call.S, call.B)
    if call.slots_k and dk.numel():
        arguments = (
            q, k, v, call.w, call.rest, do, weight, unit, dk, *exponents, call.peak, call.last.largest, r, r_1, call.cu,
            *call.strides(q, k, v), *scalars,
        )  # fmt: skip
        _start_keys((call.slots_k, call.Hk, 1), arguments, call.options("keys"))
    if call.slots_k and dv.numel():
        arguments = (
            q, k, call.w, call.rest, do, weight, dv, *exponents, call.peak, call.last.largest, r, call.cu,
            *call.strides(q, k), *scalars,
        )  # fmt: skip
        _start_values((call.slots_k, call.Hk, 1), arguments, call.options("values"))
    ds, dz = first.s, first.z
    if not problem.causal:
        # every query reads the last state
        before, after = state.largest, call.last.largest
        keep = torch.where(before == -torch.inf, 0.0, (before - after).exp())
        ds, dz = keep[..., None, None] * ds, keep[..., None] * dz
    return dq, dk, dv, ds, dz
