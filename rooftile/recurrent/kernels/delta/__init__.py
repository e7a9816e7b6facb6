"""The gated delta rule in Triton kernels, for Ampere and newer: g of each head, heads up to 128, fp32, bf16 and fp16.

    call             the sizes and tiles of a call, and what its chunks need but the state
    walks            the walks from chunk to chunk, in Triton, or by
    chunks           the forward, by chunks of 64 tokens; `inverse` inverts their systems
    ends             states behind tokens, and gradients of those before them, without outputs
    gradients        the backward, by the same chunks, whose states are computed again
    launch_hopper, walk_hopper, walk_back_hopper    in Gluon, on Hopper
    steps            one token of each sequence, in place

Every sum has one owner and one order: results are the same bits from run to run, and no sequence knows its neighbours. A NaN or
an infinity may reach earlier tokens of its chunk.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from rooftile.recurrent.kernels.delta.call import constants_of, prepared, readable
from rooftile.recurrent.kernels.delta.ends import begin, end, end_with_map
from rooftile.recurrent.kernels.delta.gradients import (
    _key_gradients,
    _pair_gradients,
    _query_gradients,
)
from rooftile.recurrent.kernels.delta.steps import _step
from rooftile.recurrent.kernels.delta.walks import walk, walk_back
from rooftile.recurrent.linear.kernels.tiles import is_hopper
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.launch import Kernel

__all__ = ["backward", "begin", "end", "end_with_map", "forward", "refusal", "step", "step_refusal"]

LARGEST_DIM = 128
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_start_step, _start_pairs = Kernel(_step), Kernel(_pair_gradients)
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


def forward(
    tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the outputs in the dtype of v, and the last states in fp32."""
    chunks, v = prepared(tokens, state, cu, options), tokens[2]
    assert v is not None
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    return y, walk(chunks, y)


def backward(
    dy: Tensor, d_last: Tensor | None, tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
) -> list[Tensor]:
    """Returns the gradients of q, k, v, g, beta and the first states, from the gradients of the outputs and the last states."""
    chunks = prepared(tokens, state, cu, options)
    q, k, v, *_ = chunks.tokens
    unit, factor, beta, recall, left, reach = chunks.vectors
    heads, dim_v = v.shape[-2:]
    dy, qk_norm = dy.contiguous(), chunks.flags["QK_NORM"]
    q_strides, k_strides, v_strides, *_ = chunks.strides
    sizes = (chunks.length, chunks.sequences)
    new, dr = chunks.empty(*v.shape), chunks.empty(*v.shape)
    states, d_states = (chunks.empty(chunks.slots, heads, q.shape[-1], dim_v) for _ in range(2))
    walk(chunks, None, states, new)
    found = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (*tokens, state) if one is not None]
    walk_back(chunks, dy, dr, d_states, d_last, found[-1])
    if v.numel():
        # nothing reads X and P any more
        by_key, by_both = chunks.pairs, chunks.x
        part, d_write = torch.empty_like(unit), torch.empty_like(unit)
        grid, (dq, dk, dv, dg, dbeta, _) = (chunks.slots, k.shape[-2], 1), found
        read = (q, k, v, beta, dy, new, dr, chunks.total, unit, factor)
        written = (by_key, by_both, part, d_write, dv, chunks.cu, q_strides, k_strides, v_strides)
        _start_pairs((chunks.slots, heads, 1), (*read, *written, *sizes), chunks.constants("pair_gradients"))
        read = (q, k, dy, states, reach, by_key, part, dq, chunks.cu, q_strides, k_strides, *sizes)
        _start_queries(grid, read, chunks.constants("query_gradients", QK_NORM=qk_norm))
        read = (q, k, beta, new, dr, states, d_states, unit, recall, left, chunks.end)
        written = (by_key, by_both, part, d_write, dk, dg, dbeta, chunks.cu, q_strides, k_strides)
        _start_keys(grid, (*read, *written, *sizes), chunks.constants("key_gradients", QK_NORM=qk_norm))
    return found


def step(state: Tensor, tokens: Tensors, constants: Tensors, slots: Tensor | None, options: Given) -> Tensor:
    """Reads one token of each sequence, changes the states in place, and returns outputs in the dtype of v."""
    q, k, v, g, beta = readable(tokens)
    scale, qk_norm = options
    count, heads, dim_v = v.shape
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if y.numel():
        shape = (heads, heads // k.shape[-2], q.shape[-1], dim_v, q.dtype, is_hopper(q.device))
        own = constants_of("step", *shape, QK_NORM=qk_norm, SLOTS=slots is not None)
        rows = k if slots is None else slots.contiguous()
        strides = (state.stride(), *(x.stride()[:2] for x in (q, k, v, g, beta)))
        given = (state, q, k, v, g, beta, y, rows, *strides, scale)
        _start_step((count * heads * triton.cdiv(dim_v, own["BLOCK_V"]), 1, 1), given, own)
    return y
