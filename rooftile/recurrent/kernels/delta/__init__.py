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

from rooftile.recurrent.kernels.delta.chunks import CHUNK, _outputs, _prepare, _walk
from rooftile.recurrent.kernels.delta.gradients import (
    _key_gradients,
    _pair_gradients,
    _query_gradients,
    _through_outputs,
    _walk_back,
)
from rooftile.recurrent.kernels.delta.steps import _step
from rooftile.recurrent.linear.kernels.tiles import is_hopper
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.launch import Kernel

LARGEST_DIM = 128
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_start_prepare, _start_walk, _start_outputs, _start_step = Kernel(_prepare), Kernel(_walk), Kernel(_outputs), Kernel(_step)
_start_through_outputs, _start_walk_back = Kernel(_through_outputs), Kernel(_walk_back)
_start_pairs, _start_queries, _start_keys = Kernel(_pair_gradients), Kernel(_query_gradients), Kernel(_key_gradients)


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


# columns of values in a tile, warps and stages: in bf16 on Hopper, in bf16 before it, and in fp16, fp32 and for narrow heads
_TILES = {
    "prepare": ((32, 2, 1), (32, 4, 1), (32, 4, 1)),
    "walk": ((32, 4, 3), (32, 4, 2), (16, 4, 1)),
    "outputs": ((128, 4, 1), (32, 4, 1), (32, 4, 1)),
    "through_outputs": ((64, 4, 1), (64, 4, 1), (32, 4, 1)),
    "walk_back": ((32, 4, 3), (32, 4, 2), (16, 4, 1)),
    "pair_gradients": ((128, 4, 2), (128, 4, 2), (32, 4, 1)),
    "query_gradients": ((64, 4, 2), (32, 8, 2), (16, 4, 1)),
    "key_gradients": ((64, 8, 1), (16, 8, 1), (16, 4, 1)),
    "step": ((32, 4, 1), (32, 4, 1), (32, 4, 1)),
}
# tiles on Hopper in bf16, where 64 columns give each processor of a chip a program
_WIDE_TILES = {"walk": (64, 4, 2), "walk_back": (64, 4, 1)}
_PROCESSORS = 128


def tile_of(kernel: str, dim: int, dim_v: int, dtype: torch.dtype, hopper: bool, walks: int = 0) -> dict[str, Any]:
    """Returns the columns of a tile, how its products are made, warps and stages; `walks` are sequences times value heads.

    A tile has at least 64 rows and 16 columns, so that each of four warps owns whole pieces of every product: Triton 3.6 reads
    beyond its shared memory where eight warps share 16 columns.
    """
    by_bf16 = _by_bf16(dim, dim_v, dtype)
    block_v, warps, stages = _TILES[kernel][2 if not by_bf16 else 0 if hopper else 1]
    if kernel in _WIDE_TILES and by_bf16 and hopper:
        if walks * triton.cdiv(dim_v, 64) >= _PROCESSORS:
            block_v, warps, stages = _WIDE_TILES[kernel]
    block_v = min(block_v, max(triton.next_power_of_2(dim_v), 16))
    block_d = max(triton.next_power_of_2(dim), 16 if kernel == "step" else 64)
    if kernel == "prepare":
        block_d = 32
    found = {"BLOCK_D": block_d, "BLOCK_V": block_v, "num_warps": warps, "num_stages": stages}
    # products of tf32 are as exact as fp16
    how = "bf16" if by_bf16 else "fp32" if dtype == torch.float32 else "tf32"
    return found if kernel == "step" else found | {"HOW": how}


@cache
def _constants(
    kernel: str, heads: int, group: int, dim: int, dim_v: int, dtype: torch.dtype, hopper: bool, walks: int = 0, **own: bool
) -> dict[str, Any]:  # fmt: skip
    """Returns one dictionary for the same arguments: a launch is recognised by it."""
    return {"HEADS": heads, "GROUP": group, "D": dim, "DV": dim_v} | own | tile_of(kernel, dim, dim_v, dtype, hopper, walks)


class _Chunks(NamedTuple):
    """A call by chunks: its tensors in a readable form, what the kernels are compiled for, and what they leave in memory."""

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
    # (1 + M)^-1, W, U and later V', and the states before all chunks
    x: Tensor
    w: Tensor
    u: Tensor
    states: Tensor
    # sums of exponents, and what keys are multiplied by
    total: Tensor
    unit: Tensor

    def constants(self, kernel: str, **own: bool) -> dict[str, Any]:
        walks = self.sequences * self.shape[0] if kernel in _WIDE_TILES else 0
        return _constants(kernel, *self.shape, walks, **own, PACKED=self.flags["PACKED"])


def _chunks(tokens: Tensors, state: Tensor, cu: Tensor | None, qk_norm: bool) -> tuple[_Chunks, Tensor]:
    """Computes what all chunks add and the states before them; returns the last states, too."""
    q, k, v, g, beta = own = _readable(tokens)
    packed, length, (heads, dim_v), dim = cu is not None, q.shape[-3], v.shape[-2:], q.shape[-1]
    sequences = state.shape[0]
    slots = length // CHUNK.value + sequences if packed else -(-length // CHUNK.value) * sequences
    device, wide = q.device, torch.bfloat16 if _by_bf16(dim, dim_v, q.dtype) else torch.float32
    chunks = _Chunks(
        own, state.contiguous(), k if cu is None else cu, [_strides(x, packed) for x in own],
        (heads, heads // k.shape[-2], dim, dim_v, q.dtype, is_hopper(q.device)), {"QK_NORM": qk_norm, "PACKED": packed}, length, slots, sequences,
        torch.empty((slots, heads, CHUNK.value, CHUNK.value), dtype=torch.float32, device=device),
        torch.empty((*v.shape[:-1], dim), dtype=wide, device=device), torch.empty(v.shape, dtype=wide, device=device),
        torch.empty((slots, heads, dim, dim_v), dtype=wide, device=device),
        torch.empty(v.shape[:-1], dtype=torch.float64, device=device),
        torch.empty(v.shape[:-1], dtype=torch.float32, device=device),
    )  # fmt: skip
    _, k_strides, v_strides, g_strides, beta_strides = chunks.strides
    x, w, u, states, total, unit = chunks[-6:]
    last = torch.empty(state.shape, dtype=torch.float32, device=device)
    if v.numel():
        tensors = (k, v, g, beta, x, w, u, total, unit, chunks.cu)
        numbers = (k_strides, v_strides, g_strides, beta_strides, length, sequences)
        _start_prepare((slots, heads, 1), (*tensors, *numbers), chunks.constants("prepare", QK_NORM=qk_norm))
    if last.numel():
        of_walk = chunks.constants("walk")
        walked = (k, w, u, states, total, unit, chunks.state, last, chunks.cu, k_strides, length, sequences)
        _start_walk((triton.cdiv(dim_v, of_walk["BLOCK_V"]), sequences, heads), walked, of_walk)
    return chunks, last


def forward(
    tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the outputs in the dtype of v, and the last states in fp32."""
    scale, qk_norm = options
    chunks, last = _chunks(tokens, state, cu, qk_norm)
    q, k, v, _, _ = chunks.tokens
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if y.numel():
        own = chunks.constants("outputs", QK_NORM=qk_norm)
        tensors = (q, k, chunks.u, chunks.states, chunks.total, chunks.unit, y, chunks.cu)
        numbers = (*chunks.strides[:2], scale, chunks.length, chunks.sequences)
        _start_outputs((chunks.slots, v.shape[-2], triton.cdiv(v.shape[-1], own["BLOCK_V"])), (*tensors, *numbers), own)
    return y, last


def backward(
    dy: Tensor, d_last: Tensor | None, tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
) -> list[Tensor]:
    """Returns the gradients of q, k, v, g, beta and the first states, from the gradients of the outputs and the last states."""
    scale, qk_norm = options
    chunks, _ = _chunks(tokens, state, cu, qk_norm)
    q, k, v, _, beta = chunks.tokens
    (heads, dim_v), key_heads, dy = v.shape[-2:], k.shape[-2], dy.contiguous()
    q_strides, k_strides, v_strides, _, beta_strides = chunks.strides
    sizes = (chunks.length, chunks.sequences)
    x, _, new, states, total, unit = chunks[-6:]
    d_new, d_states, factor = torch.empty_like(new), torch.empty_like(states), torch.empty_like(unit)
    found = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (*tokens, state) if one is not None]
    if v.numel():
        own = chunks.constants("through_outputs", QK_NORM=qk_norm)
        given = (q, k, dy, total, unit, factor, d_new, chunks.cu, q_strides, k_strides, scale, *sizes)
        _start_through_outputs((chunks.slots, heads, 1), given, own)
    if state.numel():
        own = chunks.constants("walk_back", HAS_LAST=d_last is not None)
        last = chunks.state if d_last is None else d_last.contiguous()
        read = (q, k, chunks.w, dy, d_new, d_states, total, unit, factor, last, found[-1], chunks.cu)
        _start_walk_back(
            (triton.cdiv(dim_v, own["BLOCK_V"]), chunks.sequences, heads), (*read, q_strides, k_strides, *sizes), own
        )
    if v.numel():
        by_key, by_both = (torch.empty((*x.shape[:-1], n * CHUNK.value), dtype=new.dtype, device=x.device) for n in (1, 2))
        part, d_write = torch.empty_like(unit), torch.empty_like(unit)
        grid, (dq, dk, dv, dg, dbeta, _) = (chunks.slots, key_heads, 1), found
        read = (q, k, v, beta, dy, x, new, d_new, total, unit, factor, by_key, by_both, part, d_write, dv, chunks.cu)
        numbers = (q_strides, k_strides, v_strides, beta_strides, *sizes)
        _start_pairs((chunks.slots, heads, 1), (*read, *numbers), chunks.constants("pair_gradients"))
        read = (q, k, dy, states, total, factor, by_key, part, dq, chunks.cu, q_strides, k_strides, scale, *sizes)
        _start_queries(grid, read, chunks.constants("query_gradients", QK_NORM=qk_norm))
        read = (q, k, beta, new, d_new, states, d_states, total, unit, by_both, part, d_write, dk, dg, dbeta, chunks.cu)
        _start_keys(grid, (*read, q_strides, k_strides, beta_strides, *sizes), chunks.constants("key_gradients", QK_NORM=qk_norm))
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
