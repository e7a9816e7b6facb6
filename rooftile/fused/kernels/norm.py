"""Norms, and an addition with its norm, in one pass: `rooftile.fused.norm` defines them, and these round where it rounds."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.fused.kernels.quantised import out_of, rows_for, store_rows
from rooftile.fused.kernels.tile import LONG_PIECE, PIECE, warps_for
from rooftile.runtime.dependent_launch import overlaps, wait_for_inputs
from rooftile.runtime.launch import Kernel

# numbers of a row that a program holds: more of them leave the registers
WHOLE = 32768


@triton.jit
def _normalised(x, weight, bias, there, eps, dtype, SIZE: tl.constexpr, KIND: tl.constexpr):
    """RMS: x / sqrt(mean x² + eps) * w. Layer: the same for x - mean x, plus b. All in fp32; x is 0 outside `there`."""
    if KIND == "layer":
        x = tl.where(there, x - (tl.sum(x, 1) / SIZE)[:, None], 0.0)
    return _weighted(x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None], weight, bias, dtype, KIND)


@triton.jit
def _weighted(x, weight, bias, dtype, KIND: tl.constexpr):
    """A normalised x times its weight, plus its bias."""
    if KIND == "layer":
        x = x * weight + bias
    elif KIND == "plus one":
        x = x * (1.0 + weight)
    elif KIND == "rounds once":
        x = x * weight
    else:
        tl.static_assert(KIND == "rms")
        # rounded before the product and after it
        x = x.to(dtype).to(tl.float32) * weight
    return x.to(dtype)


# fmt: off
@triton.jit(do_not_specialize=["total"])
def _normalise(
    x_ptr, residual_ptr, stream_ptr, o_ptr, weight_ptr, bias_ptr, post_weight_ptr, post_bias_ptr, scales_ptr, given_ptr, total,
    x_stride_t, x_stride_h, eps, post_eps, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, KIND: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr, OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    # fmt: on
    """Normalises BLOCK_R rows, each a head of a token: x, or the residual plus x, which may itself be normalised first.

    The sum goes to the stream, which may be the residual.

    OUT: empty, or how the rounded rows are quantised (`store_rows`).
    """
    if PDL:
        wait_for_inputs()
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_N)[None, :]
    t, h = r // HEADS, r % HEADS
    there = (t < total)[:, None] & (n < SIZE)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # every load is issued before the first sum waits for one
    x = tl.load(x_ptr + (t * x_stride_t + h * x_stride_h)[:, None] + n, mask=there, other=0.0).to(tl.float32)
    line = (r * SIZE)[:, None] + n
    if RESIDUAL:
        residual = tl.load(residual_ptr + line, mask=there, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + n, mask=n < SIZE, other=0.0).to(tl.float32)
    bias = weight
    if KIND == "layer":
        bias = tl.load(bias_ptr + n, mask=n < SIZE, other=0.0).to(tl.float32)
    if POST != "":
        post_weight = tl.load(post_weight_ptr + n, mask=n < SIZE, other=0.0).to(tl.float32)
        post_bias = post_weight
        if POST == "layer":
            post_bias = tl.load(post_bias_ptr + n, mask=n < SIZE, other=0.0).to(tl.float32)
        x = _normalised(x, post_weight, post_bias, there, post_eps, dtype, SIZE, POST).to(tl.float32)
    if RESIDUAL:
        # the norm sees the stream as later layers will read it: rounded to its dtype
        stream = (residual + x).to(stream_ptr.dtype.element_ty)
        tl.store(stream_ptr + line, stream, mask=there)
        x = stream.to(tl.float32)
    y = _normalised(x, weight, bias, there, eps, dtype, SIZE, KIND)
    if OUT == "":
        tl.store(o_ptr + line, y, mask=there)
    else:
        store_rows(y, o_ptr, line, scales_ptr + r, given_ptr, there, t < total, OUT, True)


@triton.jit
def _piece(x_ptr, n, SIZE: tl.constexpr, STAYS: tl.constexpr):
    """Numbers n of a row in fp32, 0 past its end; STAYS says when they leave the cache."""
    return tl.load(x_ptr + n, mask=n < SIZE, other=0.0, eviction_policy=STAYS).to(tl.float32)


@triton.jit
def _normalise_long(
    x_ptr, residual_ptr, stream_ptr, o_ptr, weight_ptr, bias_ptr, x_stride_t, x_stride_h, eps, HEADS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_normalise` of one row that would leave the registers: it is read again for each sum, and finds itself in a cache.

    The rows of all programs are larger than the cache together with what they write, so loads and stores say what is used again.
    """
    if PDL:
        wait_for_inputs()
    r = tl.program_id(0).to(tl.int64)
    x_ptr += r // HEADS * x_stride_t + r % HEADS * x_stride_h
    lane = tl.arange(0, BLOCK)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        n = start + lane
        if RESIDUAL:
            x = _piece(x_ptr, n, SIZE, "evict_first")
            stream = (_piece(residual_ptr + r * SIZE, n, SIZE, "evict_first") + x).to(stream_ptr.dtype.element_ty)
            tl.store(stream_ptr + r * SIZE + n, stream, mask=n < SIZE, eviction_policy="evict_last")
            x = stream.to(tl.float32)
        else:
            x = _piece(x_ptr, n, SIZE, "evict_last")
        sums += x if KIND == "layer" else x * x
    if RESIDUAL:
        # other threads of the program may read what one has written
        tl.debug_barrier()
        x_ptr = stream_ptr + r * SIZE
    mean = tl.sum(sums, 0) / SIZE
    if KIND == "layer":
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, SIZE, BLOCK):
            n = start + lane
            x = tl.where(n < SIZE, _piece(x_ptr, n, SIZE, "evict_last") - mean, 0.0)
            sums += x * x
    inverse = tl.rsqrt(tl.sum(sums, 0) / SIZE + eps)
    for start in range(0, SIZE, BLOCK):
        n = start + lane
        x = _piece(x_ptr, n, SIZE, "evict_first")
        if KIND == "layer":
            x -= mean
        weight = _piece(weight_ptr, n, SIZE, "evict_last")
        bias = weight
        if KIND == "layer":
            bias = _piece(bias_ptr, n, SIZE, "evict_last")
        y = _weighted(x * inverse, weight, bias, dtype, KIND)
        tl.store(o_ptr + r * SIZE + n, y, mask=n < SIZE, eviction_policy="evict_first")


_start_normalise, _start_long = Kernel(_normalise), Kernel(_normalise_long)


def normalise(x: Tensor, norm) -> Tensor:
    """x (total, size) or (total, heads, size), normalised over its last axis: contiguous, whatever x is."""
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _launch(x, None, None, o, norm, None)
    return o


def add_norm(x: Tensor, residual: Tensor, norm, post=None) -> Tensor:
    """Adds x, or x normalised by `post`, to a contiguous residual in place, and returns the sum normalised by `norm`."""
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _launch(x, residual, residual, o, norm, post)
    return o


def sum_norm(x: Tensor, residual: Tensor, norm) -> tuple[Tensor, Tensor]:
    """Returns the sum of x and a contiguous residual, normalised, and as it is; the residual stays as it was."""
    o, stream = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if x.numel():
        _launch(x, residual, stream, o, norm, None)
    return o, stream


def quantised(
    x: Tensor, residual: Tensor | None, norm, post, format: str, given: Tensor | None, stream: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the codes and scales of what `normalise` returns for x (total, size), or `add_norm` if there is a residual.

    The sum goes to `stream`, or takes the residual's place.
    """
    codes, scales = rows_for(x.shape, format, x.device)
    if x.numel():
        out = out_of(format, given)
        stream = residual if stream is None else stream
        _launch(x, residual, stream, codes, norm, post, out, scales, scales if given is None else given)
    return codes, scales


def _launch(
    x: Tensor, residual: Tensor | None, stream: Tensor | None, o: Tensor, norm, post, out: str = "", scales: Tensor | None = None,
    given: Tensor | None = None,
) -> None:  # fmt: skip
    x = x if x.stride(-1) == 1 else x.contiguous()
    total, heads, size = x.shape[0], x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    if size > WHOLE and post is None and not out:
        _launch_long(x, residual, stream, o, norm, total * heads, heads)
        return
    first = norm if post is None else post
    weight, bias, first_weight, first_bias = norm.weight, norm.bias, first.weight, first.bias
    post_kind = "" if post is None else _kind(post)
    constants = _constants(heads, size, _kind(norm), residual is not None, post_kind, out, x.device)
    arguments = (
        x, o if residual is None else residual, o if stream is None else stream, o, weight, weight if bias is None else bias,
        first_weight, first_weight if first_bias is None else first_bias, o if scales is None else scales,
        o if given is None else given, total, x.stride(0), x.stride(1) if heads > 1 else 0,
        norm.eps, first.eps,
    )  # fmt: skip
    _start_normalise((triton.cdiv(total * heads, constants["BLOCK_R"]), 1, 1), arguments, constants)


def _launch_long(x: Tensor, residual: Tensor | None, stream: Tensor | None, o: Tensor, norm, rows: int, heads: int) -> None:
    bias = norm.weight if norm.bias is None else norm.bias
    arguments = (
        x, o if residual is None else residual, o if stream is None else stream, o, norm.weight, bias, x.stride(0),
        x.stride(1) if heads > 1 else 0, norm.eps,
    )  # fmt: skip
    _start_long((rows, 1, 1), arguments, long_constants(heads, x.shape[-1], _kind(norm), residual is not None, x.device))


@cache
def long_constants(heads: int, size: int, kind: str, residual: bool, device: torch.device) -> dict[str, Any]:
    """The compile-time arguments for a row that is read in pieces."""
    own = {"HEADS": heads, "SIZE": size, "BLOCK": LONG_PIECE, "KIND": kind, "RESIDUAL": residual}
    return own | overlaps(device) | {"num_warps": warps_for(LONG_PIECE), "enable_fp_fusion": False}


def _kind(norm) -> str:
    if norm.bias is not None:
        return "layer"
    return "plus one" if norm.plus_one else "rounds once" if norm.rounds_once else "rms"


@cache
def _constants(
    heads: int, size: int, kind: str, residual: bool, post: str, out: str, device: torch.device
) -> dict[str, Any]:  # fmt: skip
    """The compile-time arguments; `post` is the kind of the norm before the addition, and empty if there is none."""
    own = {"HEADS": heads, "SIZE": size, "KIND": kind, "RESIDUAL": residual, "POST": post, "OUT": out}
    # the compiler would fuse one product of a sum of two, and which one differs from kernel to kernel
    return tile_of(size) | own | overlaps(device) | {"enable_fp_fusion": False}


def tile_of(size: int) -> dict[str, int]:
    """Rows and columns of a program's tile, and its warps, for rows of this length."""
    block_n = triton.next_power_of_2(size)
    block_r = max(PIECE // block_n, 1)
    return {"BLOCK_R": block_r, "BLOCK_N": block_n, "num_warps": warps_for(block_r * block_n)}
