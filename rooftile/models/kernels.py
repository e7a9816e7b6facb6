"""The decoder's memory-bound operations on a GPU, each in one pass: what `layers` defines, rounded where it rounds.

Nothing here waits for the device or depends on data in its shapes, so that graphs take it in. Tiles and warps follow from the
size of a row alone and never from how many rows there are, so that the bits of a row do not depend on the batch it is in.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.hardware.quick import Quick
from rooftile.models.layers import Norm

# A row is read once, whole, before anything is done with it, so what matters is how many bytes are under way at once. Reasoned,
# not yet measured, for an H200 with its 132 multiprocessors:
#   1 row: one program, and all its time is latency. More warps make nothing shorter where a thread's loads are two of 16 bytes.
#   256 rows: some two programs on each multiprocessor, with everything under way at once.
#   8192 rows: a row of 4096 in bf16 is 8 kB of x and 8 of the residual. A multiprocessor holds at least four programs of 8
#     warps, 64 kB under way, and 25 to 40 should keep the memory busy. A weight is read by every row, and found in a cache.
# Numbers of a thread: two loads of 16 bytes in bf16. Twice that at 16384, since threads of 32 warps have 64 registers at most.
NUMBERS, MOST_WARPS = 16, 16
# Numbers of a program: short rows, and heads, share one. The same for a piece of a gate: a row of 14336 has seven, and 8192
# rows have so many that each should not be shorter.
PIECE = 2048

KINDS = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "relu": "relu", "silu": "silu"}


@triton.jit
def _normal(x, weight, bias, there, eps, dtype, SIZE: tl.constexpr, LAYER: tl.constexpr, PLUS_ONE: tl.constexpr):
    """RMS: x / sqrt(mean x² + eps) * w. Layer: the same of x - mean x, + b. All in fp32; x is 0 where it is not there."""
    if LAYER:
        x = tl.where(there, x - (tl.sum(x, 1) / SIZE)[:, None], 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
    if LAYER:
        x = x * weight + bias
    elif PLUS_ONE:
        x = x * (1.0 + weight)
    else:
        # rounded before the product and after it
        x = x.to(dtype).to(tl.float32) * weight
    return x.to(dtype)


# fmt: off
@triton.jit(do_not_specialize=["total"])
def _normalise(
    x_ptr, residual_ptr, o_ptr, weight_ptr, bias_ptr, post_weight_ptr, post_bias_ptr, total, x_stride_t, x_stride_h,
    eps, post_eps, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    LAYER: tl.constexpr, PLUS_ONE: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr, POST_LAYER: tl.constexpr,
    POST_PLUS_ONE: tl.constexpr,
):
    # fmt: on
    """BLOCK_R rows, each a head of a token: x, or the residual with x added to it, of which x may be normalised first."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_N)[None, :]
    t, h = r // HEADS, r % HEADS
    there = (t < total)[:, None] & (n < SIZE)
    dtype: tl.constexpr = o_ptr.dtype.element_ty
    # everything is asked for before the first sum waits
    x = tl.load(x_ptr + (t * x_stride_t + h * x_stride_h)[:, None] + n, mask=there, other=0.0).to(tl.float32)
    line = (r * SIZE)[:, None] + n
    if RESIDUAL:
        residual = tl.load(residual_ptr + line, mask=there, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + n, mask=n < SIZE, other=0.0).to(tl.float32)
    bias = weight
    if LAYER:
        bias = tl.load(bias_ptr + n, mask=n < SIZE, other=0.0).to(tl.float32)
    if POST:
        post_weight = tl.load(post_weight_ptr + n, mask=n < SIZE, other=0.0).to(tl.float32)
        post_bias = post_weight
        if POST_LAYER:
            post_bias = tl.load(post_bias_ptr + n, mask=n < SIZE, other=0.0).to(tl.float32)
        x = _normal(x, post_weight, post_bias, there, post_eps, dtype, SIZE, POST_LAYER, POST_PLUS_ONE).to(tl.float32)
    if RESIDUAL:
        # what is normalised is the stream as later layers will read it
        stream = (residual + x).to(dtype)
        tl.store(residual_ptr + line, stream, mask=there)
        x = stream.to(tl.float32)
    tl.store(o_ptr + line, _normal(x, weight, bias, there, eps, dtype, SIZE, LAYER, PLUS_ONE), mask=there)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "tanh":
        # gelu(x) = x (1 + tanh z) / 2 with z = √(2/π) (x + 0.044715 x³), and (1 + tanh z) / 2 = 1 / (1 + exp(-2z)): nothing
        # cancels, and exp may overflow, as x / inf is the zero that is due
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * (x * x * x))))
    elif KIND == "erf":
        y = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "relu")
        # this way round NaN stays NaN
        y = tl.where(x <= 0.0, 0.0, x)
    return y


@triton.jit
def _gated(x_ptr, o_ptr, FFN: tl.constexpr, PIECE: tl.constexpr, KIND: tl.constexpr):
    """A piece of a row: the activation of its gate, rounded, times what it lets through."""
    pieces: tl.constexpr = (FFN + PIECE - 1) // PIECE
    row = (tl.program_id(0) // pieces).to(tl.int64)
    n = tl.program_id(0) % pieces * PIECE + tl.arange(0, PIECE)
    gate = tl.load(x_ptr + row * (2 * FFN) + n, mask=n < FFN, other=0.0)
    up = tl.load(x_ptr + row * (2 * FFN) + FFN + n, mask=n < FFN, other=0.0)
    open_ = _activated(gate.to(tl.float32), KIND).to(gate.dtype).to(tl.float32)
    tl.store(o_ptr + row * FFN + n, (open_ * up.to(tl.float32)).to(gate.dtype), mask=n < FFN)


_start_normalise, _start_gated = Quick(_normalise), Quick(_gated)


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """x (total, size) or (total, heads, size), normalised over its last axis: contiguous, whatever x is."""
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _launch(x, None, o, norm, None)
    return o


def add_norm(x: Tensor, residual: Tensor, norm: Norm, post: Norm | None = None) -> tuple[Tensor, Tensor]:
    """The residual stream with x, or x normalised by `post`, added to it: normalised, and as it is.

    A contiguous residual is updated in place and returned: what it was is gone. Nobody needs it, and half as many lines of the L2
    cache are touched.
    """
    residual = residual.contiguous()
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _launch(x, residual, o, norm, post)
    return o, residual


def gated(x: Tensor, activation: str) -> Tensor:
    """Activation of the gate times what it lets through: x (total, 2 * ffn), the gate first, to (total, ffn)."""
    x = x.contiguous()
    total, ffn = x.shape[0], x.shape[1] // 2
    o = torch.empty((total, ffn), dtype=x.dtype, device=x.device)
    piece = min(PIECE, triton.next_power_of_2(ffn))
    if total:
        _start_gated((total * triton.cdiv(ffn, piece), 1, 1), (x, o), _gate(ffn, piece, activation))
    return o


def _launch(x: Tensor, residual: Tensor | None, o: Tensor, norm: Norm, post: Norm | None) -> None:
    x = x if x.stride(-1) == 1 else x.contiguous()
    total, heads, size = x.shape[0], x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    first = norm if post is None else post
    constants = _constants(
        heads, size, norm.kind, norm.plus_one, residual is not None, post is not None, first.kind, first.plus_one
    )
    arguments = (
        x, o if residual is None else residual, o, norm.weight, norm.weight if norm.bias is None else norm.bias,
        first.weight, first.weight if first.bias is None else first.bias, total, x.stride(0), x.stride(1) if heads > 1 else 0,
        norm.eps, first.eps,
    )  # fmt: skip
    _start_normalise((triton.cdiv(total * heads, constants["BLOCK_R"]), 1, 1), arguments, constants)


@cache
def _constants(
    heads: int, size: int, kind: str, plus_one: bool, residual: bool, post: bool, post_kind: str, post_plus_one: bool
) -> dict[str, Any]:  # fmt: skip
    return _tile(size) | {
        "HEADS": heads, "SIZE": size, "LAYER": kind == "layer", "PLUS_ONE": plus_one, "RESIDUAL": residual, "POST": post,
        "POST_LAYER": post_kind == "layer", "POST_PLUS_ONE": post_plus_one,
    }  # fmt: skip


def _tile(size: int) -> dict[str, int]:
    block_n = triton.next_power_of_2(size)
    block_r = max(PIECE // block_n, 1)
    return {"BLOCK_R": block_r, "BLOCK_N": block_n, "num_warps": _warps(block_r * block_n)}


@cache
def _gate(ffn: int, piece: int, activation: str) -> dict[str, Any]:
    return {"FFN": ffn, "PIECE": piece, "KIND": KINDS[activation], "num_warps": _warps(piece)}


def _warps(numbers: int) -> int:
    return min(max(numbers // (32 * NUMBERS), 1), MOST_WARPS)
