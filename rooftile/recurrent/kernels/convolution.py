"""The causal convolution: tiles of tokens and channels, each of whose inputs comes from memory once and from the cache after that.

A tile reads the inputs before it, of its sequence or of the tail, so that no program waits for another. Sequences of a packed batch
are found by the offsets on the device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.recurrent.kernels import convolution_gradients as gradients
from rooftile.recurrent.kernels.parts import TOKENS, inputs, readable, silu, token_strides, unknown_dtype
from rooftile.recurrent.linear.kernels.tiles import part_of
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.launch import Kernel

LARGEST_K = 8
_CHANNELS = 128


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _conv(
    x_ptr, weight_ptr, bias_ptr, tail_ptr, y_ptr, cu_ptr, x_strides, T, B,
    W: tl.constexpr, K: tl.constexpr, BLOCK_W: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the outputs of a tile."""
    b, length, first, start = part_of(tl.program_id(0), cu_ptr, T, B, TOKENS, PACKED)
    if start >= length:
        return
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    t = start + tl.arange(0, TOKENS)
    here = t < length
    x_base = x_ptr + b.to(tl.int64) * x_strides[0]
    tail_base = tail_ptr + b.to(tl.int64) * W * (K - 1)
    y = tl.zeros((TOKENS, BLOCK_W), tl.float32)
    for k in tl.static_range(K):
        x = inputs(x_base, tail_base, first, t - (K - 1) + k, w, here, W, K, x_strides[1], start)
        y += x * tl.load(weight_ptr + w * K + k, mask=w < W, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + w, mask=w < W, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y = silu(y)
    row = (0 if PACKED else b.to(tl.int64) * T) + first + t
    tl.store(y_ptr + row[:, None] * W + w[None, :], y.to(y_ptr.dtype.element_ty), mask=here[:, None] & (w < W)[None, :])


# fmt: off
@triton.jit(do_not_specialize=["T"])
def _last_inputs(
    x_ptr, tail_ptr, last_ptr, cu_ptr, x_strides, T,
    W: tl.constexpr, K: tl.constexpr, BLOCK_W: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the last K - 1 inputs of a sequence, some of which may be of the tail before it."""
    b = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    first, length = b * 0, b * 0 + T
    if PACKED:
        first = tl.load(cu_ptr + b).to(tl.int64)
        length = tl.load(cu_ptr + b + 1).to(tl.int64) - first
    own = b * W * (K - 1) + w.to(tl.int64) * (K - 1)
    for k in tl.static_range(K - 1):
        t = length - (K - 1) + k
        x = tl.load(x_ptr + b * x_strides[0] + (first + t) * x_strides[1] + w, mask=(w < W) & (t >= 0), other=0.0)
        past = tl.load(tail_ptr + own + t + K - 1, mask=(w < W) & (t < 0), other=0.0)
        tl.store(last_ptr + own + k, tl.where(t < 0, past, x), mask=w < W)


# fmt: off
@triton.jit
def _conv_step(
    tail_ptr, x_ptr, weight_ptr, bias_ptr, slots_ptr, y_ptr, tail_strides, x_strides, slots_stride,
    W: tl.constexpr, K: tl.constexpr, BLOCK_W: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOTS: tl.constexpr,
):
    # fmt: on
    """Reads one token of a sequence, and moves its tail by one."""
    s = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = w < W
    row = tl.load(slots_ptr + s * slots_stride).to(tl.int64) if HAS_SLOTS else s
    own = tail_ptr + row * tail_strides[0] + w.to(tl.int64) * tail_strides[1]
    y = tl.zeros((BLOCK_W,), tl.float32)
    for k in tl.static_range(K - 1):
        x = tl.load(own + k * tail_strides[2], mask=inside, other=0.0)
        y += x.to(tl.float32) * tl.load(weight_ptr + w * K + k, mask=inside, other=0.0).to(tl.float32)
        if k > 0:
            tl.store(own + (k - 1) * tail_strides[2], x, mask=inside)
    x = tl.load(x_ptr + s * x_strides[0] + w.to(tl.int64) * x_strides[1], mask=inside, other=0.0).to(tail_ptr.dtype.element_ty)
    y += x.to(tl.float32) * tl.load(weight_ptr + w * K + K - 1, mask=inside, other=0.0).to(tl.float32)
    if K > 1:
        tl.store(own + (K - 2) * tail_strides[2], x, mask=inside)
    if HAS_BIAS:
        y += tl.load(bias_ptr + w, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y = silu(y)
    tl.store(y_ptr + s * W + w, y.to(y_ptr.dtype.element_ty), mask=inside)


_start, _start_last, _start_step = Kernel(_conv), Kernel(_last_inputs), Kernel(_conv_step)
_start_sums, _start_inputs = Kernel(gradients._sum_gradients), Kernel(gradients._input_gradients)
_start_tails = Kernel(gradients._tail_gradients)


@cache
def constants_of(W: int, K: int, **own: int) -> dict[str, Any]:
    """One dictionary for the same arguments: a launch is recognised by it."""
    # a step's program must have a channel for each thread, so that no thread reads what another has moved
    return {"W": W, "K": K, "BLOCK_W": _CHANNELS, "num_warps": 4, **own}


def refusal(tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> str | None:
    """Says why the kernels do not run such tensors, or None."""
    (x,), (weight, _) = tokens, constants
    assert x is not None and weight is not None
    if weight.shape[1] > LARGEST_K:
        return f"a window of {weight.shape[1]} tokens; has up to {LARGEST_K}"
    return unknown_dtype(x, state)


step_refusal = refusal


def forward(
    tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns contiguous outputs in the dtype of x, and the last inputs of each sequence."""
    (x,), (weight, bias) = tokens, constants
    assert x is not None and weight is not None
    x, weight, tail = readable(x), weight.contiguous(), state.contiguous()
    W, K, T, packed = x.shape[-1], weight.shape[1], x.shape[-2], cu is not None
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    last = torch.empty(tail.shape, dtype=tail.dtype, device=x.device)
    count, size, blocks = tail.shape[0], TOKENS.value, triton.cdiv(W, _CHANNELS)
    strides, offsets = token_strides(x, packed), x if cu is None else cu
    if y.numel():
        slots = T // size + count if packed else triton.cdiv(T, size) * count
        own = constants_of(W, K, SILU=bool(options[0]), HAS_BIAS=bias is not None, PACKED=packed)
        bias = weight if bias is None else bias.contiguous()
        _start((slots, blocks, 1), (x, weight, bias, tail, y, offsets, strides, T, count), own)
    if last.numel():
        _start_last((count, blocks, 1), (x, tail, last, offsets, strides, T), constants_of(W, K, PACKED=packed))
    return y, last


def step(state: Tensor, tokens: Tensors, constants: Tensors, slots: Tensor | None, options: Given) -> Tensor:
    """Reads one token of each sequence, changes the tails in place, and returns contiguous outputs."""
    (x,), (weight, bias) = tokens, constants
    assert x is not None and weight is not None
    weight = weight.contiguous()
    W, K = weight.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        own = constants_of(W, K, SILU=bool(options[0]), HAS_BIAS=bias is not None, HAS_SLOTS=slots is not None)
        arguments = (
            state, x, weight, weight if bias is None else bias.contiguous(), x if slots is None else slots, y,
            state.stride(), x.stride(), 0 if slots is None else slots.stride(0),
        )  # fmt: skip
        _start_step((x.shape[0], triton.cdiv(W, _CHANNELS), 1), arguments, own)
    return y


def backward(
    dy: Tensor, d_last: Tensor | None, tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of x, of the weight, of the bias where it is there, and of the first tail."""
    (x,), (weight, bias) = tokens, constants
    assert x is not None and weight is not None
    x, rows, tail, dy = readable(x), weight.contiguous(), state.contiguous(), dy.contiguous()
    d_last = torch.zeros_like(tail) if d_last is None else d_last.contiguous()
    (W, K), T, count, packed = weight.shape, x.shape[-2], tail.shape[0], cu is not None
    dx, d_tail = (torch.empty(like.shape, dtype=like.dtype, device=x.device) for like in (x, tail))
    g = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    offsets, blocks, part_size = x if cu is None else cu, triton.cdiv(W, _CHANNELS), gradients.PART.value
    slots, tiles = (T // size + count if packed else triton.cdiv(T, size) * count for size in (part_size, TOKENS.value))
    # not every slot of a packed batch has tokens
    part = torch.zeros((slots, K + 1, W), dtype=torch.float32, device=x.device)
    own = constants_of(W, K, PACKED=packed, num_warps=8)
    if x.numel():
        more = {"num_warps": 8, "SILU": bool(options[0]), "HAS_BIAS": bias is not None, "PACKED": packed}
        shift = rows if bias is None else bias.contiguous()
        arguments = (x, dy, rows, shift, tail, g, part, offsets, token_strides(x, packed), T, count)
        _start_sums((slots, blocks, 1), arguments, constants_of(W, K, BLOCK_K=triton.next_power_of_2(K + 1), **more))
        _start_inputs((tiles, blocks, 1), (g, rows, d_last, dx, offsets, T, count), own)
    if tail.numel():
        _start_tails((count, blocks, 1), (g, rows, d_last, d_tail, offsets, T), own)
    total = part.sum(0)
    d_weight = total[:K].t().to(weight.dtype).contiguous()
    return [dx, d_weight, *([] if bias is None else [total[K].to(bias.dtype)]), d_tail]
