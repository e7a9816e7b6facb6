"""AdamW for many weights in one launch: a program takes a chunk of one weight.

    g = clip * gradient + (1 - mask) d p
    p = (1 - lr λ) p
    m = m + (1 - β₁) (g - m)
    v = β₂ v + (1 - β₂) g²
    p = p - lr / (1 - β₁ᵗ) * m / (√v / √(1 - β₂ᵗ) + ε)

A program finds its weight's addresses in a table on the device. The table is made again only when an address changes, and the
places of chunks when a size does.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.optim import split as halves
from rooftile.optim.definition import StepNumbers
from rooftile.optim.split import BLOCK
from rooftile.runtime.launch import BoundedCache, Kernel, is_capturing

CHUNK = 16384
# addresses of one weight: weight, gradient, first, second, rest, mask, step, sums
ADDRESSES = 8
PLACE, MIX = tl.constexpr(halves.PLACE), tl.constexpr(halves.MIX)


@triton.jit
def _one_less_exp(x):
    """1 - exp(x) for x <= 0, as exact near zero as elsewhere."""
    series = -x * (1.0 + x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * (1.0 + x / 5 * (1.0 + x / 6 * (1.0 + x / 7))))))
    return tl.where(x > -0.5, series, 1.0 - tl.exp(x))


@triton.jit
def _joined(high, rest):
    """The fp32 number of a bf16 number and its rest: `rooftile.optim.split`."""
    bits = high.to(tl.int16, bitcast=True).to(tl.int32)
    return ((bits << 16) + rest.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _halves(x):
    bits = x.to(tl.int32, bitcast=True)
    high = (bits + 0x8000) >> 16
    rest = bits - (high << 16)
    lost = x != x
    high = tl.where(lost, 0x7FC0, high).to(tl.int16)
    return high.to(tl.bfloat16, bitcast=True), tl.where(lost, 0, rest).to(tl.int16)


@triton.jit
def _sum(x, there, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The sum over the bits and places of a block: `rooftile.optim.split.sums_of`."""
    mixed = (x.to(tl.int16, bitcast=True).to(tl.int32) ^ (tl.arange(0, BLOCK) * PLACE)) * MIX
    mixed = mixed ^ ((mixed >> 15) & 0x1FFFF)
    if MASKED:
        mixed = tl.where(there, mixed, 0)
    # the interpreter refuses a sum that wraps
    return tl.sum(mixed.to(tl.int64)).to(tl.int32)


@triton.jit
def _update(
    w_ptr, g_ptr, m_ptr, v_ptr, rest_ptr, mask_ptr, sum_ptr, n, end, kept, size_of_step, root, beta1, beta2, eps, scale, left_out,
    W: tl.constexpr, M: tl.constexpr, SPLIT: tl.constexpr, SPARSE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Updates the numbers at n; numbers from `end` on do not exist (MASKED)."""
    there = n < end if MASKED else None
    g = tl.load(g_ptr + n, mask=there).to(tl.float32) * scale
    m = tl.load(m_ptr + n, mask=there).to(tl.float32)
    v = tl.load(v_ptr + n, mask=there).to(tl.float32)
    w = tl.load(w_ptr + n, mask=there)
    if SPLIT:
        # a block that somebody else has changed has rests of other weights
        is_own = _sum(w, there, BLOCK, MASKED) == tl.load(sum_ptr)
        p = _joined(w, tl.where(is_own, tl.load(rest_ptr + n, mask=there), 0))
    else:
        p = w.to(tl.float32)
    if SPARSE:
        g += tl.where(tl.load(mask_ptr + n, mask=there) != 0, 0.0, p) * left_out
    p *= kept
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p -= size_of_step * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + root) + eps)
    if SPLIT:
        high, rest = _halves(p)
        tl.store(w_ptr + n, high, mask=there)
        tl.store(rest_ptr + n, rest, mask=there)
        tl.store(sum_ptr, _sum(high, there, BLOCK, MASKED))
    else:
        tl.store(w_ptr + n, p.to(W), mask=there)
    tl.store(m_ptr + n, m.to(M), mask=there)
    tl.store(v_ptr + n, v.to(M), mask=there)


# fmt: off
@triton.jit
def _adamw(
    table_ptr, chunks_ptr, lr_ptr, clip_ptr, lr, kept, size_of_step, root, beta1, beta2, log_beta1, log_beta2, eps, decay, sign,
    left_out, W: tl.constexpr, G: tl.constexpr, M: tl.constexpr, SPLIT: tl.constexpr, SPARSE: tl.constexpr,
    COUNTED: tl.constexpr, LR: tl.constexpr,
    CLIP: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ADDRESSES: tl.constexpr,
):
    # fmt: on
    place = tl.program_id(0) * 3
    which, start, end = tl.load(chunks_ptr + place), tl.load(chunks_ptr + place + 1) * CHUNK, tl.load(chunks_ptr + place + 2)
    line = table_ptr + which * ADDRESSES
    w_ptr = tl.load(line).to(tl.pointer_type(W))
    g_ptr = tl.load(line + 1).to(tl.pointer_type(G))
    m_ptr = tl.load(line + 2).to(tl.pointer_type(M))
    v_ptr = tl.load(line + 3).to(tl.pointer_type(M))
    rest_ptr = tl.load(line + 4).to(tl.pointer_type(tl.int16))
    mask_ptr = tl.load(line + 5).to(tl.pointer_type(tl.int8))
    sums_ptr = tl.load(line + 7).to(tl.pointer_type(tl.int32))
    if ALIGNED:
        w_ptr, g_ptr, rest_ptr = tl.multiple_of(w_ptr, 16), tl.multiple_of(g_ptr, 16), tl.multiple_of(rest_ptr, 16)
        m_ptr, v_ptr, mask_ptr = tl.multiple_of(m_ptr, 16), tl.multiple_of(v_ptr, 16), tl.multiple_of(mask_ptr, 16)
    if LR:
        lr = tl.load(lr_ptr).to(tl.float32)
        kept = 1.0 - lr * decay
    if COUNTED:
        t = tl.load(tl.load(line + 6).to(tl.pointer_type(tl.float32)))
        size_of_step = lr / _one_less_exp(t * log_beta1)
        root = tl.sqrt_rn(_one_less_exp(t * log_beta2))
    elif LR:
        # the host gave the step's size for a rate of one
        size_of_step *= lr
    scale = sign
    if CLIP:
        scale *= tl.load(clip_ptr).to(tl.float32)
    for offset in range(0, CHUNK, BLOCK):
        n = start + offset + tl.arange(0, BLOCK)
        sum_ptr = sums_ptr + (start + offset) // BLOCK
        # a mask would break up the loads of 16 bytes
        if start + offset + BLOCK <= end:
            _update(
                w_ptr, g_ptr, m_ptr, v_ptr, rest_ptr, mask_ptr, sum_ptr, n, end, kept, size_of_step, root, beta1, beta2, eps,
                scale, left_out, W, M, SPLIT, SPARSE, BLOCK, False,
            )  # fmt: skip
        elif start + offset < end:
            _update(
                w_ptr, g_ptr, m_ptr, v_ptr, rest_ptr, mask_ptr, sum_ptr, n, end, kept, size_of_step, root, beta1, beta2, eps,
                scale, left_out, W, M, SPLIT, SPARSE, BLOCK, True,
            )  # fmt: skip


_start = Kernel(_adamw)
_tables, _chunks = BoundedCache(64), BoundedCache(64)
# pinned memory for a table that is made while a graph is captured, when none can be allocated, by its size
_spare: dict[int, Tensor] = {}


def step(
    weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor], rests: list[Tensor],
    sums: list[Tensor], steps: list[Tensor], masks: list[Tensor], lr: Tensor | None, clip: Tensor | None,
    numbers: StepNumbers, maximize: bool,
) -> None:  # fmt: skip
    """Updates all weights in one launch: dense weights, whose gradients have their layout in memory."""
    gradients = [_lying_as(w, g) for w, g in zip(weights, gradients, strict=True)]
    lists = (weights, gradients, first, second, rests or weights, masks or weights, steps or weights, sums or weights)
    addresses = [x.data_ptr() for row in zip(*lists, strict=True) for x in row]
    device = weights[0].device
    table, chunks = _table(tuple(addresses), device), _chunks_of(tuple(x.numel() for x in weights), device)
    if not chunks.shape[0]:
        return
    constants = constants_of(
        weights[0].dtype, gradients[0].dtype, first[0].dtype, bool(rests), bool(masks), bool(steps), lr is not None,
        clip is not None, not any(address % 16 for n, address in enumerate(addresses) if n % ADDRESSES < 6),
    )  # fmt: skip
    rate = numbers.lr if lr is None else 1.0
    corrections = [1 - beta ** max(numbers.step, 1) for beta in (numbers.beta1, numbers.beta2)]
    arguments = (
        table, chunks, table if lr is None else lr, table if clip is None else clip, float(rate),
        1 - rate * numbers.weight_decay, rate / corrections[0], math.sqrt(corrections[1]), numbers.beta1, numbers.beta2,
        math.log(numbers.beta1) if numbers.beta1 else -math.inf, math.log(numbers.beta2) if numbers.beta2 else -math.inf,
        numbers.eps, numbers.weight_decay, -1.0 if maximize else 1.0, numbers.left_out,
    )  # fmt: skip
    _start((chunks.shape[0], 1, 1), arguments, constants)


def _lying_as(weight: Tensor, gradient: Tensor) -> Tensor:
    if gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


def _table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    key = (addresses, device)
    found: Tensor | None = _tables.get(key)
    if found is not None:
        return found
    host = torch.tensor(addresses, dtype=torch.int64)
    if device.type == "cuda":
        if is_capturing():
            # the captured copy reads this memory at every replay, so it is never given back
            pinned = _spare.pop(len(addresses)).copy_(host)
            _kept.append(pinned)
        else:
            pinned = host.pin_memory()
            if len(addresses) not in _spare:
                _spare[len(addresses)] = torch.empty_like(pinned, pin_memory=True)
        host = pinned
    found = host.to(device, non_blocking=True)
    _tables[key] = found
    return found


_kept: list[Tensor] = []


def _chunks_of(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    key = (sizes, device)
    found: Tensor | None = _chunks.get(key)
    if found is None:
        rows = [(n, chunk, size) for n, size in enumerate(sizes) for chunk in range(-(-size // CHUNK))]
        found = torch.tensor(rows, dtype=torch.int64).view(-1, 3).to(device)
        _chunks[key] = found
    return found


_TYPES: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@cache
def constants_of(
    weight: torch.dtype, gradient: torch.dtype, moment: torch.dtype, split: bool, sparse: bool, counted: bool, lr: bool,
    clip: bool, aligned: bool,
) -> dict[str, Any]:  # fmt: skip
    """The compile-time arguments."""
    return {
        "W": _TYPES[weight], "G": _TYPES[gradient], "M": _TYPES[moment], "SPLIT": split, "SPARSE": sparse,
        "COUNTED": counted, "LR": lr, "CLIP": clip,
        "ALIGNED": aligned, "CHUNK": CHUNK, "BLOCK": BLOCK, "ADDRESSES": ADDRESSES, "num_warps": 8,
        # the compiler would fuse one product of a sum of two, and which one differs between split weights and fp32 ones
        "enable_fp_fusion": False,
    }  # fmt: skip
