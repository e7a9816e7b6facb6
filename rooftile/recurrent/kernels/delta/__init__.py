"""The gated delta rule in Triton kernels, for Ampere and newer: g of each head, heads up to 128, fp32, bf16 and fp16.

    chunks      the forward, by chunks of 64 tokens
    gradients   the backward, by the same chunks, whose states are computed again
    steps       one token of each sequence, in place

Every sum has one owner and one order: results are the same bits from run to run, and no sequence knows its neighbours. A NaN or
an infinity may reach earlier tokens of its chunk.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rooftile.recurrent.kernels.delta.chunks import CHUNK, _prepare, _walk
from rooftile.recurrent.kernels.delta.gradients import (
    _key_gradients,
    _pair_gradients,
    _query_gradients,
    _walk_back,
)
from rooftile.recurrent.kernels.delta.steps import _step
from rooftile.recurrent.linear.kernels.tiles import is_hopper
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.launch import Kernel

LARGEST_DIM = 128
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_start_prepare, _start_walk, _start_step = Kernel(_prepare), Kernel(_walk), Kernel(_step)
_start_walk_back, _start_pairs = Kernel(_walk_back), Kernel(_pair_gradients)
_start_queries, _start_keys = Kernel(_query_gradients), Kernel(_key_gradients)


def refusal(tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> str | None:
    """Says why the kernels do not run such tensors, or None."""
    if (reason := step_refusal(tokens, constants, state, options)) is not None:
        return reason
    return None if state.dtype == torch.float32 else f"a state in {state.dtype}; have float32"


def step_refusal(tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> str | None:
    """Says why the kernel of a step does not run such tensors, or None."""
    q, _, v, g, _ = tokens
    assert q is not None
    assert v is not None
    assert g is not None
    if g.ndim == q.ndim:
        return "g for each channel; the kernels have g for each head"
    if q.dtype not in _DTYPES or state.dtype not in _DTYPES:
        wrong = state.dtype if q.dtype in _DTYPES else q.dtype
        return f"{wrong}; the kernels have float32, bfloat16 and float16"
    if not q.shape[-1] or not v.shape[-1] or max(q.shape[-1], v.shape[-1]) > LARGEST_DIM:
        return f"head dims {q.shape[-1]}, {v.shape[-1]}; the kernels have 1 to {LARGEST_DIM}"
    return None


def _by_bf16(dim: int, dim_v: int, dtype: torch.dtype) -> bool:
    """Whether products, and what kernels leave for each other, are in bf16: it has the range of sums over a long text, fp16 has not.

    Heads below 64 take products of tf32: Triton 3.6 reads beyond its shared memory in those of bf16 with 16 or 32 columns.
    """
    return dtype == torch.bfloat16 and min(dim, dim_v) >= 64


# columns of values in a tile (of keys for "prepare"), warps and stages: in bf16 on Hopper, in bf16 before it, and in fp16, fp32
# and for narrow heads
_TILES = {
    "prepare": ((128, 4, 1), (32, 4, 1), (32, 4, 1)),
    "walk": ((32, 4, 2), (32, 4, 2), (16, 4, 1)),
    "walk_back": ((32, 4, 2), (32, 4, 1), (16, 4, 1)),
    "pair_gradients": ((128, 4, 2), (128, 4, 2), (32, 4, 1)),
    "query_gradients": ((64, 4, 2), (32, 8, 2), (16, 4, 1)),
    "key_gradients": ((64, 8, 1), (32, 8, 1), (16, 4, 1)),
    "step": ((32, 4, 1), (32, 4, 1), (32, 4, 1)),
}
# tiles on Hopper in bf16, where 64 columns give each processor of a chip a program
_WIDE_TILES = {"walk": (64, 4, 2), "walk_back": (64, 4, 2)}
_PROCESSORS = 128


def tile_of(kernel: str, dim: int, dim_v: int, dtype: torch.dtype, hopper: bool, walks: int = 0) -> dict[str, Any]:
    """Returns the columns of a tile, how its products are made, warps and stages; `walks` are sequences times value heads.

    A tile of products has at least 64 rows and 16 columns, so that each of four warps owns whole pieces of it: Triton 3.6 reads
    beyond its shared memory where eight warps share 16 columns.
    """
    by_bf16 = _by_bf16(dim, dim_v, dtype)
    block_v, warps, stages = _TILES[kernel][2 if not by_bf16 else 0 if hopper else 1]
    if kernel in _WIDE_TILES and by_bf16 and hopper and walks * triton.cdiv(dim_v, 64) >= _PROCESSORS:
        block_v, warps, stages = _WIDE_TILES[kernel]
    found = {"num_warps": warps, "num_stages": stages}
    if kernel == "prepare":
        found |= {"BLOCK_D": block_v}
    else:
        block_v, least = min(block_v, max(triton.next_power_of_2(dim_v), 16)), 16 if kernel == "step" else 64
        found |= {"BLOCK_D": max(triton.next_power_of_2(dim), least), "BLOCK_V": block_v}
    # products of tf32 are as exact as fp16
    how = "bf16" if by_bf16 else "fp32" if dtype == torch.float32 else "tf32"
    return found if kernel == "step" else found | {"HOW": how}


@cache
def _constants(
    kernel: str, heads: int, group: int, dim: int, dim_v: int, dtype: torch.dtype, hopper: bool, walks: int = 0, **own: bool
) -> dict[str, Any]:  # fmt: skip
    """Returns one dictionary for the same arguments: a launch is recognised by it."""
    sizes = {"HEADS": heads, "GROUP": group, "D": dim} | ({} if kernel == "prepare" else {"DV": dim_v})
    return sizes | own | tile_of(kernel, dim, dim_v, dtype, hopper, walks)


class _Chunks(NamedTuple):
    """A call by chunks: its tensors in a readable form, what the kernels are compiled for, and what `_prepare` leaves in memory."""

    tokens: list[Tensor]
    state: Tensor
    # offsets, or any tensor in their place
    cu: Tensor
    strides: list[tuple[int, int, int]]
    shape: tuple[int, int, int, int, torch.dtype, bool]
    flags: dict[str, bool]
    length: int
    # chunks, and sequences
    slots: int
    sequences: int
    # the inverse of 1 + M, and P
    x: Tensor
    pairs: Tensor
    # sums of exponents
    total: Tensor
    # beta in fp32, a key's inverse length, a query's times the scale, and these with exponentials
    beta: Tensor
    unit: Tensor
    factor: Tensor
    recall: Tensor
    left: Tensor
    reach: Tensor
    # the exponential of a chunk's sum
    end: Tensor

    def constants(self, kernel: str, **own: bool) -> dict[str, Any]:
        walks = self.sequences * self.shape[0] if kernel in _WIDE_TILES else 0
        return _constants(kernel, *self.shape, walks, **own, PACKED=self.flags["PACKED"])

    def empty(self, *shape: int) -> Tensor:
        """Makes a tensor of the dtype of what kernels leave for each other."""
        return torch.empty(shape, dtype=self.x.dtype, device=self.x.device)

    def walk(self, y: Tensor | None, states: Tensor | None, new: Tensor | None) -> Tensor:
        """Writes y, or else V' and the states before all chunks; returns the last states."""
        (q, k, v, *_), last = self.tokens, torch.empty(self.state.shape, dtype=torch.float32, device=self.x.device)
        if last.numel():
            own = self.constants("walk", OUTPUTS=y is not None)
            read = (q, k, v, self.beta, self.x, self.pairs, self.recall, self.left, self.reach, self.end)
            written = (self.x if states is None else states, v if new is None else new, v if y is None else y)
            _start_walk(
                (triton.cdiv(self.shape[3], own["BLOCK_V"]), self.sequences, self.shape[0]),
                (*read, *written, self.state, last, self.cu, *self.strides[:3], self.length, self.sequences),
                own,
            )
        return last


def _chunks(tokens: Tensors, state: Tensor, cu: Tensor | None, options: Given) -> _Chunks:
    """Computes what all chunks need but the state."""
    q, k, v, g, beta = given = _readable(tokens)
    scale, qk_norm = options
    packed, length, (heads, dim_v), dim = cu is not None, q.shape[-3], v.shape[-2:], q.shape[-1]
    sequences = state.shape[0]
    slots = length // CHUNK.value + sequences if packed else -(-length // CHUNK.value) * sequences
    device, wide = q.device, torch.bfloat16 if _by_bf16(dim, dim_v, q.dtype) else torch.float32
    square = (slots, heads, CHUNK.value, CHUNK.value)
    chunks = _Chunks(
        given, state.contiguous(), k if cu is None else cu, [_strides(x, packed) for x in given],
        (heads, heads // k.shape[-2], dim, dim_v, q.dtype, is_hopper(q.device)), {"QK_NORM": qk_norm, "PACKED": packed}, length, slots, sequences,
        torch.empty(square, dtype=wide, device=device), torch.empty(square, dtype=wide, device=device),
        torch.empty(v.shape[:-1], dtype=torch.float64, device=device),
        *torch.empty((6, *v.shape[:-1]), dtype=torch.float32, device=device),
        torch.empty((slots, heads), dtype=torch.float32, device=device),
    )  # fmt: skip
    if v.numel():
        exact = torch.empty(square, dtype=torch.float32, device=device)
        written = (chunks.x, chunks.pairs, exact, *chunks[-8:], chunks.cu)
        numbers = (*chunks.strides[:2], *chunks.strides[3:], scale, length, sequences)
        own = chunks.constants("prepare", QK_NORM=qk_norm)
        _start_prepare((slots, heads, 1), (q, k, g, beta, *written, *numbers), own)
    return chunks


def forward(
    tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the outputs in the dtype of v, and the last states in fp32."""
    chunks, v = _chunks(tokens, state, cu, options), tokens[2]
    assert v is not None
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    return y, chunks.walk(y, None, None)


def backward(
    dy: Tensor, d_last: Tensor | None, tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
) -> list[Tensor]:
    """Returns the gradients of q, k, v, g, beta and the first states, from the gradients of the outputs and the last states."""
    chunks = _chunks(tokens, state, cu, options)
    q, k, v, *_ = chunks.tokens
    heads, dim_v = v.shape[-2:]
    dy, qk_norm = dy.contiguous(), chunks.flags["QK_NORM"]
    q_strides, k_strides, v_strides, *_ = chunks.strides
    sizes = (chunks.length, chunks.sequences)
    new, dr = chunks.empty(*v.shape), chunks.empty(*v.shape)
    states, d_states = (chunks.empty(chunks.slots, heads, q.shape[-1], dim_v) for _ in range(2))
    chunks.walk(None, states, new)
    found = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (*tokens, state) if one is not None]
    if state.numel():
        own = chunks.constants("walk_back", HAS_LAST=d_last is not None)
        last = chunks.state if d_last is None else d_last.contiguous()
        read = (q, k, chunks.beta, dy, chunks.x, chunks.pairs, chunks.recall, chunks.left, chunks.reach, chunks.end)
        _start_walk_back(
            (triton.cdiv(dim_v, own["BLOCK_V"]), chunks.sequences, heads),
            (*read, dr, d_states, last, found[-1], chunks.cu, q_strides, k_strides, *sizes),
            own,
        )
    if v.numel():
        # nothing reads X and P any more
        by_key, by_both = chunks.pairs, chunks.x
        part, d_write = torch.empty_like(chunks.unit), torch.empty_like(chunks.unit)
        grid, (dq, dk, dv, dg, dbeta, _) = (chunks.slots, k.shape[-2], 1), found
        read = (q, k, v, chunks.beta, dy, new, dr, chunks.total, chunks.unit, chunks.factor)
        written = (by_key, by_both, part, d_write, dv, chunks.cu, q_strides, k_strides, v_strides)
        _start_pairs((chunks.slots, heads, 1), (*read, *written, *sizes), chunks.constants("pair_gradients"))
        read = (q, k, dy, states, chunks.reach, by_key, part, dq, chunks.cu, q_strides, k_strides, *sizes)
        _start_queries(grid, read, chunks.constants("query_gradients", QK_NORM=qk_norm))
        read = (q, k, chunks.beta, new, dr, states, d_states, chunks.unit, chunks.recall, chunks.left, chunks.end)
        written = (by_key, by_both, part, d_write, dk, dg, dbeta, chunks.cu, q_strides, k_strides)
        _start_keys(grid, (*read, *written, *sizes), chunks.constants("key_gradients", QK_NORM=qk_norm))
    return found


def step(state: Tensor, tokens: Tensors, constants: Tensors, slots: Tensor | None, options: Given) -> Tensor:
    """Reads one token of each sequence, changes the states in place, and returns outputs in the dtype of v."""
    q, k, v, g, beta = _readable(tokens)
    scale, qk_norm = options
    count, heads, dim_v = v.shape
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if y.numel():
        shape = (heads, heads // k.shape[-2], q.shape[-1], dim_v, q.dtype, is_hopper(q.device))
        own = _constants("step", *shape, QK_NORM=qk_norm, SLOTS=slots is not None)
        rows = k if slots is None else slots.contiguous()
        strides = (state.stride(), *(x.stride()[:2] for x in (q, k, v, g, beta)))
        given = (state, q, k, v, g, beta, y, rows, *strides, scale)
        _start_step((count * heads * triton.cdiv(dim_v, own["BLOCK_V"]), 1, 1), given, own)
    return y


def _strides(x: Tensor, packed: bool) -> tuple[int, int, int]:
    """Returns the strides of sequences, tokens and heads."""
    return (0, x.stride(0), x.stride(1)) if packed else (x.stride(0), x.stride(1), x.stride(2))


def _readable(tokens: Tensors) -> list[Tensor]:
    """Returns q, k, v, g and beta, the first three with their last axis in one piece."""
    found = []
    for n, x in enumerate(tokens):
        assert x is not None
        found.append(x if n > 2 or x.stride(-1) == 1 else x.contiguous())
    return found
