"""The gated delta rule in Triton kernels, for Ampere and newer: g of each head, heads up to 128, fp32, bf16 and fp16.

    chunks   the forward, by chunks of 64 tokens
    steps    one token of each sequence, in place

Every sum has one owner and one order: results are the same bits from run to run, and no sequence knows its neighbours. The
gradients are computed in plain operations. A NaN or an infinity may reach earlier tokens of its chunk.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from rooftile.recurrent.kernels.delta.chunks import CHUNK, _invert, _outputs, _prepare, _walk
from rooftile.recurrent.kernels.delta.steps import _step
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.launch import Kernel

LARGEST_DIM = 128
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_start_invert, _start_prepare, _start_walk = Kernel(_invert), Kernel(_prepare), Kernel(_walk)
_start_outputs, _start_step = Kernel(_outputs), Kernel(_step)


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


def tile_of(kernel: str, dim: int, dim_v: int, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the columns of a tile, how its products are made, and warps: bf16 and fp16 spill nothing on sm80 and sm90."""
    block_d, block_v = (max(triton.next_power_of_2(n), 16) for n in (dim, dim_v))
    if kernel == "step":
        return {"BLOCK_D": block_d, "BLOCK_V": min(block_v, 32), "num_warps": 4, "num_stages": 1}
    narrow = dtype == torch.bfloat16
    columns = {"invert": 128, "prepare": 64 if narrow else 32, "walk": 32, "outputs": 128 if narrow else 64}[kernel]
    # bf16 has the range of sums over a long text; fp16 has not, so its products are of tf32, as exact as fp16
    if kernel == "prepare":
        block_d = min(block_d, columns)
    how = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "tf32"}[dtype]
    stages = 2 if narrow and kernel == "walk" else 1
    warps = 4 if narrow and kernel == "walk" else 8
    return {"BLOCK_D": block_d, "BLOCK_V": min(block_v, columns), "num_warps": warps, "num_stages": stages, "HOW": how}


@cache
def _constants(kernel: str, heads: int, group: int, dim: int, dim_v: int, dtype: torch.dtype, **own: bool) -> dict[str, Any]:
    """Returns one dictionary for the same arguments: a launch is recognised by it."""
    found = {"HEADS": heads, "GROUP": group, "D": dim, "DV": dim_v} | own | tile_of(kernel, dim, dim_v, dtype)
    if kernel == "invert":
        del found["DV"], found["BLOCK_V"]
    return found


def forward(
    tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the outputs in the dtype of v, and the last states in fp32."""
    q, k, v, g, beta = _readable(tokens)
    scale, qk_norm = options
    packed, length, (heads, dim_v), dim = cu is not None, q.shape[-3], v.shape[-2:], q.shape[-1]
    sequences = state.shape[0]
    shape = (heads, heads // k.shape[-2], dim, dim_v, q.dtype)
    slots = length // CHUNK.value + sequences if packed else -(-length // CHUNK.value) * sequences
    device, wide = q.device, torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    y, last = torch.empty(v.shape, dtype=v.dtype, device=device), torch.empty(state.shape, device=device)
    w, u = (torch.empty((*v.shape[:-1], n), dtype=wide, device=device) for n in (dim, dim_v))
    states = torch.empty((slots, heads, dim, dim_v), dtype=wide, device=device)
    x = torch.empty((slots, heads, CHUNK.value, CHUNK.value), dtype=torch.float32, device=device)
    total = torch.empty(v.shape[:-1], dtype=torch.float64, device=device)
    unit = torch.empty(v.shape[:-1], dtype=torch.float32, device=device)
    # any tensor stands for the offsets of calls that are not packed
    offsets = k if cu is None else cu
    q_strides, k_strides, v_strides, g_strides, beta_strides = (_strides(x, packed) for x in (q, k, v, g, beta))
    if y.numel():
        own = _constants("invert", *shape, QK_NORM=qk_norm, PACKED=packed)
        known = (k, g, beta, x, total, unit, offsets, k_strides, g_strides, beta_strides, length, sequences)
        _start_invert((slots, heads, 1), known, own)
        own = _constants("prepare", *shape, PACKED=packed)
        added = (k, v, beta, x, w, u, total, unit, offsets, k_strides, v_strides, beta_strides, length, sequences)
        _start_prepare((slots, heads, 1), added, own)
    if last.numel():
        own = _constants("walk", *shape, PACKED=packed)
        walked = (k, w, u, states, total, unit, state.contiguous(), last, offsets, k_strides, length, sequences)
        _start_walk((triton.cdiv(dim_v, own["BLOCK_V"]), sequences, heads), walked, own)
    if y.numel():
        own = _constants("outputs", *shape, QK_NORM=qk_norm, PACKED=packed)
        read = (q, k, u, states, total, unit, y, offsets, q_strides, k_strides, scale, length, sequences)
        _start_outputs((slots, heads, triton.cdiv(dim_v, own["BLOCK_V"])), read, own)
    return y, last


# plain operations compute the gradients
backward = None


def step(state: Tensor, tokens: Tensors, constants: Tensors, slots: Tensor | None, options: Given) -> Tensor:
    """Reads one token of each sequence, changes the states in place, and returns outputs in the dtype of v."""
    q, k, v, g, beta = _readable(tokens)
    scale, qk_norm = options
    count, heads, dim_v = v.shape
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if y.numel():
        shape = (heads, heads // k.shape[-2], q.shape[-1], dim_v, q.dtype)
        own = _constants("step", *shape, QK_NORM=qk_norm, SLOTS=slots is not None)
        rows = k if slots is None else slots.contiguous()
        strides = (state.stride(), *(x.stride()[:2] for x in (q, k, v, g, beta)))
        given = (state, q, k, v, g, beta, y, rows, *strides, scale)
        _start_step((count, heads, triton.cdiv(dim_v, own["BLOCK_V"])), given, own)
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
