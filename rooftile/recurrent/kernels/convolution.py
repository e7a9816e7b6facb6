"""The causal convolution: a program walks PART tokens of some channels, and keeps the last K inputs in registers.

So each input is read once, but for the K - 1 before a part, which come from its sequence or from the tail: no program waits for
another. Sequences of a packed batch are found by the offsets on the device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.recurrent.kernels import convolution_gradients as gradients
from rooftile.recurrent.kernels.convolution_parts import TOKENS, inputs_before, row_of, slot_of, taps
from rooftile.recurrent.kernels.parts import readable, silu, token_strides, unknown_dtype
from rooftile.recurrent.linear.kernels.tiles import part_of
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.dependent_launch import overlaps, wait_for_inputs
from rooftile.runtime.launch import Kernel

LARGEST_K = 8
_CHANNELS = 128
# tokens of a program that walks them: K - 1 more are read before them
PART = 128


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _conv(
    x_ptr, weight_ptr, bias_ptr, tail_ptr, y_ptr, cu_ptr, x_strides, T, B,
    W: tl.constexpr, K: tl.constexpr, BLOCK_W: tl.constexpr, PART: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the outputs of a part."""
    slot, block = slot_of(W, BLOCK_W)
    b, length, first, start = part_of(slot, cu_ptr, T, B, PART, PACKED)
    if start >= length:
        return
    w = block * BLOCK_W + tl.arange(0, BLOCK_W)
    b = b.to(tl.int64)
    x_base, row = x_ptr + b * x_strides[0], (0 if PACKED else b * T) + first
    weights, bias = taps(weight_ptr, bias_ptr, w, W, K, HAS_BIAS)
    window = inputs_before(x_base, tail_ptr + b * W * (K - 1), first, start, w, W, K, x_strides[1])
    for c in range(start, tl.minimum(start + PART, length), TOKENS):
        # all loads are under way before the first is waited for
        rows = ()
        for i in tl.static_range(TOKENS):
            rows = rows + (row_of(x_base, first, c + i, x_strides[1], w, (w < W) & (c + i < length)),)
        for i in tl.static_range(TOKENS):
            window = window + (rows[i].to(tl.float32),)
            y = bias
            for k in tl.static_range(K):
                y += window[k] * weights[k]
            window = window[1:]
            if SILU:
                y = silu(y)
            tl.store(y_ptr + (row + c + i) * W + w, y.to(y_ptr.dtype.element_ty), mask=(w < W) & (c + i < length))


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
    PDL: tl.constexpr,
):
    # fmt: on
    """Reads one token of a sequence, and moves its tail by one."""
    if PDL:
        wait_for_inputs()
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
_start_gradients, _start_tails = Kernel(gradients._gradients), Kernel(gradients._tail_gradients)


@cache
def constants_of(W: int, K: int, **own: int) -> dict[str, Any]:
    """One dictionary for the same arguments: a launch is recognised by it."""
    # a step's program must have a channel for each thread, so that no thread reads what another has moved
    return {"W": W, "K": K, "BLOCK_W": _CHANNELS, "num_warps": 4, **own}


@cache
def walk_constants(
    W: int, K: int, part: int, silu: bool, bias: bool, packed: bool, gradients: bool = False
) -> dict[str, Any]:  # fmt: skip
    """The same for a walk over tokens, by one warp: a thread has as many channels as registers hold."""
    channels = (256 if K <= 4 else 128) // (2 if gradients else 1)
    return {
        "W": W, "K": K, "BLOCK_W": channels, "PART": part, "SILU": silu, "HAS_BIAS": bias, "PACKED": packed, "num_warps": 1,
    }  # fmt: skip


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
    count, size, blocks = tail.shape[0], PART, triton.cdiv(W, _CHANNELS)
    strides, offsets = token_strides(x, packed), x if cu is None else cu
    if y.numel():
        slots = T // size + count if packed else triton.cdiv(T, size) * count
        own = walk_constants(W, K, PART, bool(options[0]), bias is not None, packed)
        bias = weight if bias is None else bias.contiguous()
        _start((slots * triton.cdiv(W, own["BLOCK_W"]), 1, 1), (x, weight, bias, tail, y, offsets, strides, T, count), own)
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
        flags = {"SILU": bool(options[0]), "HAS_BIAS": bias is not None, "HAS_SLOTS": slots is not None}
        own = constants_of(W, K, **flags, **overlaps(x.device))
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
    offsets, size, strides = x if cu is None else cu, PART, token_strides(x, packed)
    slots = T // size + count if packed else triton.cdiv(T, size) * count
    # not every slot of a packed batch has tokens
    part = (torch.zeros if packed else torch.empty)((slots, K + 1, W), dtype=torch.float32, device=x.device)
    own = walk_constants(W, K, PART, bool(options[0]), bias is not None, packed, gradients=True)
    blocks, shift = triton.cdiv(W, own["BLOCK_W"]), rows if bias is None else bias.contiguous()
    if x.numel():
        arguments = (x, dy, rows, shift, tail, d_last, dx, part, offsets, strides, T, count)
        _start_gradients((slots * blocks, 1, 1), arguments, own)
    if tail.numel():
        _start_tails((count, blocks, 1), (x, dy, rows, shift, tail, d_last, d_tail, offsets, strides, T), own)
    total = part.sum(0)
    d_weight = total[:K].t().to(weight.dtype).contiguous()
    return [dx, d_weight, *([] if bias is None else [total[K].to(bias.dtype)]), d_tail]
