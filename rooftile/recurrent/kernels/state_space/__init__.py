"""The state-space model of Mamba-2 in Triton kernels, for Ampere and newer.

    tiles     a program's segment, steps and sums of exponents, C B^T of each group
    outputs   each segment walked with its state on the chip

Where batch and heads fill the chip, a segment is a whole sequence. C B^T is computed once for a group of heads, not once for a
head. Every sum has one owner and one order: results are the same bits from run to run, and no sequence knows its neighbours. A
NaN or infinity reaches the rows of its chunk (64 tokens at most) before its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.recurrent.kernels.parts import readable, unknown_dtype
from rooftile.recurrent.kernels.state_space.outputs import _outputs, _scan, _segment_sums
from rooftile.recurrent.kernels.state_space.tiles import _products, _steps
from rooftile.recurrent.kernels.state_space_step import step, step_refusal
from rooftile.recurrent.linear.kernels.tiles import is_hopper
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.launch import Kernel

_start_steps, _start_products, _start_sums, _start_scan, _start_outputs = map(
    Kernel, (_steps, _products, _segment_sums, _scan, _outputs)
)
__all__ = ["backward", "forward", "refusal", "step", "step_refusal"]

LARGEST_HEAD = 1024
# tokens of a segment where a sequence is cut, and numbers of a state that a program of the scan carries
_SEGMENT, _SCANNED = 2048, 1024


def refusal(tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> str | None:
    """Says why the kernels do not run such tensors, or None."""
    x = tokens[0]
    assert x is not None
    P, N = state.shape[-2:]
    if (reason := unknown_dtype(x, state)) is not None:
        return reason
    largest = 128 if x.dtype == torch.float32 else 256
    if largest < N or P > LARGEST_HEAD:
        return f"{x.dtype} with P {P} and N {N}; has P up to {LARGEST_HEAD} and N up to {largest}"
    return None


# the most that spills nothing, as compiled by Triton 3.6 for sm90 and sm80: tokens, columns, warps, stages; the second row of a
# pair is for more than 128 numbers of state
_TILES = {
    (torch.bfloat16, True): ((64, 64, 4, 1), (64, 32, 8, 2)),
    (torch.bfloat16, False): ((32, 32, 8, 2), (32, 32, 8, 2)),
    (torch.float16, True): ((32, 16, 8, 2), (32, 16, 8, 2)),
    (torch.float16, False): ((32, 16, 8, 2), (32, 16, 8, 2)),
    (torch.float32, True): ((16, 16, 8, 2), (16, 16, 8, 2)),
    (torch.float32, False): ((16, 16, 8, 2), (16, 16, 8, 2)),
}


def tile_of(P: int, N: int, dtype: torch.dtype, hopper: bool, gated: bool = False) -> dict[str, Any]:
    """Returns tokens, columns and numbers of state of a tile, how its products are made, warps and stages."""
    block, block_p, warps, stages = _TILES[dtype, hopper][N > 128]
    if gated:
        # a tile of z beside the others spills in four warps
        warps = 8
    # bf16 has the range of sums over a long text; fp16 has not, so its products are of tf32, as exact as fp16
    return {
        "BLOCK": block, "BLOCK_P": min(max(triton.next_power_of_2(P), 16), block_p),
        "BLOCK_N": max(triton.next_power_of_2(N), 16),
        "DOT": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32", "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


@cache
def _constants(
    P: int, N: int, dtype: torch.dtype, hopper: bool, heads: int, groups: int, packed: bool, **own: Any
) -> dict[str, Any]:
    """One dictionary for the same arguments: a launch is recognised by it."""
    shape = {"HEADS": heads, "SHARE": heads // groups, "P": P, "N": N, "PACKED": packed}
    return shape | tile_of(P, N, dtype, hopper, own.get("GATED", False)) | own


@cache
def _some(names: tuple[str, ...], key: tuple[Any, ...], **own: Any) -> dict[str, Any]:
    """The constants of a kernel that takes few of them."""
    every = _constants(*key)
    return {name: every[name] for name in (*names, "PACKED", "num_warps", "num_stages")} | own


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class _Call:
    """The sizes of a call, and its steps, sums and products of B and C."""

    def __init__(self, tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given) -> None:
        x, dt, B, C, z = tokens
        assert x is not None
        assert dt is not None
        assert B is not None
        assert C is not None
        self.x, self.B, self.C = (readable(given) for given in (x, B, C))
        self.z = None if z is None else readable(z)
        self.dt, self.A, self.D, self.bias, self.options = dt, *constants, options
        self.packed, self.T, (self.H, self.P) = cu is not None, x.shape[-3], x.shape[-2:]
        self.G, self.N = B.shape[-2:]
        self.count = state.shape[0]
        self.cu = x if cu is None else cu
        self.key = self.P, self.N, x.dtype, is_hopper(x.device), self.H, self.G, self.packed
        self.block: int = _constants(*self.key)["BLOCK"]
        self.size = self._segment()
        self.slots = self.T // self.size + self.count if self.packed else -(-self.T // self.size) * self.count
        # whether each segment is a whole sequence
        self.whole = not self.packed and self.size >= self.T

    def _segment(self) -> int:
        # a sequence is not cut if batch and heads alone give each processor two programs
        if not self.packed and (self.count * self.H >= 2 * _processors(self.x.device) or self.T <= _SEGMENT // 4):
            return max(-(-self.T // self.block), 1) * self.block
        size = _SEGMENT
        while size > 4 * self.block and self.T // size * self.H < 4 * _processors(self.x.device):
            size //= 2
        return size

    def strides(self, x: Tensor | None) -> tuple[int, int, int]:
        if x is None:
            return (0, 0, 0)
        return (0, x.stride(0), x.stride(1)) if self.packed else (x.stride(0), x.stride(1), x.stride(2))

    def prepare(self) -> None:
        """Writes steps, sums of exponents, and C B^T."""
        x = self.x
        self.steps = torch.empty((2, self.H, self.slots, self.size), dtype=torch.float32, device=x.device)
        softplus, low, high = self.options
        own = {"SOFTPLUS": bool(softplus), "BIAS": self.bias is not None}
        bias = self.A if self.bias is None else self.bias
        given: tuple[Any, ...] = (
            self.dt, bias, self.A, self.steps[0], self.steps[1], self.cu, self.strides(self.dt), self.T, self.count, self.size,
            self.slots, float(low), float(high),
        )  # fmt: skip
        _start_steps((self.slots, self.H, 1), given, _some(("BLOCK",), self.key, **own))
        kept = x.dtype if x.dtype == torch.bfloat16 else torch.float32
        chunks = self.size // self.block
        self.cb = torch.empty((self.slots, chunks, self.G, self.block, self.block), dtype=kept, device=x.device)
        given = (
            self.B, self.C, self.cb, self.cu, self.strides(self.B), self.strides(self.C), self.T, self.count, self.size,
        )  # fmt: skip
        names = ("N", "BLOCK", "BLOCK_N", "DOT", "PRECISION")
        _start_products((self.slots, chunks, self.G), given, _some(names, self.key, GROUPS=self.G))

    def starts(self, first: Tensor) -> Tensor:
        """Returns the state before each segment."""
        if self.whole:
            return first
        device, (P, N) = self.x.device, (self.P, self.N)
        part = torch.empty((self.slots, self.H, P, N), dtype=torch.float32, device=device)
        decay = torch.empty((self.slots, self.H), dtype=torch.float32, device=device)
        constants = _constants(*self.key)
        given: tuple[Any, ...] = (
            self.x, self.B, self.steps[0], self.steps[1], part, decay, self.cu, self.strides(self.x), self.strides(self.B),
            self.T, self.count, self.size, self.slots,
        )  # fmt: skip
        _start_sums((self.slots, self.H, triton.cdiv(P, constants["BLOCK_P"])), given, constants)
        given = (part, first, decay, self.cu, self.T, self.count, self.size)
        own = _some(("HEADS",), self.key, SIZE=P * N, BLOCK=_SCANNED)
        _start_scan((triton.cdiv(P * N, _SCANNED), self.count, self.H), given, own)
        return part


def forward(tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given) -> tuple[Tensor, Tensor]:
    """Returns y in the dtype of x, and the last states."""
    call = _Call(tokens, constants, state, cu, options)
    x, state = call.x, state.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # a sequence without tokens keeps its state
    last = state.clone() if call.packed or not call.T else torch.empty_like(state)
    if not y.numel() or not state.numel():
        return y.zero_(), last
    call.prepare()
    start = call.starts(state)
    skip = constants[0] if call.D is None else call.D
    assert skip is not None
    d_strides = (skip.stride(0), skip.stride(1) if skip.ndim == 2 else 0)
    own = _constants(*call.key, GATED=call.z is not None, SKIP=call.D is not None, WHOLE=call.whole)
    arguments = (
        x, call.B, call.C, x if call.z is None else call.z, skip, call.cb, call.steps[0], call.steps[1], start, y, last, call.cu,
        call.strides(x), call.strides(call.B), call.strides(call.C), call.strides(call.z), d_strides, call.T, call.count,
        call.size, call.slots,
    )  # fmt: skip
    _start_outputs((call.slots, call.H, triton.cdiv(call.P, own["BLOCK_P"])), arguments, own)
    return y, last


# plain operations compute the gradients
backward = None
