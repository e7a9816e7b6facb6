"""The selective scan: a thread owns a channel with all numbers of its state, and walks tokens.

So that one sequence fills a chip, it is cut into chunks of CHUNK tokens, in three launches:

    _chunk_states  walks each chunk from a state of zeros, and sums its steps
    _scan          goes from chunk to chunk: S = exp(A sum of dt) S + what the chunk adds; leaves the state before each chunk
    _outputs       walks each chunk from this state, and writes y

Every sum has one owner and one order: results are the same bits from run to run, and no sequence knows its neighbours.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.recurrent.kernels.parts import readable, silu, softplus, token_strides, unknown_dtype
from rooftile.recurrent.linear.kernels.tiles import part_of
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.launch import Kernel

CHUNK = tl.constexpr(256)
LARGEST_N = 32
# channels of a program, which is one warp: a thread has all numbers of its channel, and sums over them by itself
_CHANNELS = 32
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rates(A_ptr, n, w, W, N: tl.constexpr):
    """Loads A (N, channels) as exponents of 2."""
    inside = (n < N)[:, None] & (w < W)[None, :]
    return tl.load(A_ptr + w[None, :] * N + n[:, None], mask=inside, other=0.0).to(tl.float32) * LOG2_E


@triton.jit
def _step_of(dt_ptr, bias, inside, SOFTPLUS: tl.constexpr):
    """Loads a token's steps (channels,)."""
    dt = tl.load(dt_ptr, mask=inside, other=0.0).to(tl.float32) + bias
    return softplus(dt) if SOFTPLUS else dt


@triton.jit
def _biases(bias_ptr, w, W, HAS_BIAS: tl.constexpr, BLOCK_W: tl.constexpr):
    if HAS_BIAS:
        return tl.load(bias_ptr + w, mask=w < W, other=0.0).to(tl.float32)
    return tl.zeros((BLOCK_W,), tl.float32)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _chunk_states(
    x_ptr, dt_ptr, B_ptr, A_ptr, bias_ptr, part_ptr, total_ptr, cu_ptr, x_strides, dt_strides, B_strides, T, B,
    W: tl.constexpr, N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Writes the state (N, W) that a chunk alone leaves, and the sum of its steps (W,)."""
    slot = tl.program_id(0)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n, w = tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    in_n, in_w = n < N, w < W
    rates, bias = _rates(A_ptr, n, w, W, N), _biases(bias_ptr, w, W, HAS_BIAS, BLOCK_W)
    b = b.to(tl.int64)
    row = first + start
    x_ptr += b * x_strides[0] + row * x_strides[1] + w
    dt_ptr += b * dt_strides[0] + row * dt_strides[1] + w
    B_ptr += b * B_strides[0] + row * B_strides[1] + n
    state = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
    total = tl.zeros((BLOCK_W,), tl.float32)
    for _ in range(0, tl.minimum(CHUNK, length - start)):
        dt = _step_of(dt_ptr, bias, in_w, SOFTPLUS)
        moved = dt * tl.load(x_ptr, mask=in_w, other=0.0).to(tl.float32)
        own = tl.load(B_ptr, mask=in_n, other=0.0).to(tl.float32)
        state = tl.exp2(dt[None, :] * rates) * state + moved[None, :] * own[:, None]
        total += dt
        x_ptr += x_strides[1]
        dt_ptr += dt_strides[1]
        B_ptr += B_strides[1]
    place = slot.to(tl.int64) * N + n.to(tl.int64)
    tl.store(part_ptr + place[:, None] * W + w[None, :], state, mask=in_n[:, None] & in_w[None, :])
    tl.store(total_ptr + slot.to(tl.int64) * W + w, total, mask=in_w)


# fmt: off
@triton.jit(do_not_specialize=["T"])
def _scan(
    part_ptr, total_ptr, A_ptr, first_ptr, last_ptr, cu_ptr, T,
    W: tl.constexpr, N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Replaces what each chunk leaves by the state before it, and writes the last state (W, N) of a sequence."""
    b = tl.program_id(0)
    n, w = tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = (n < N)[:, None] & (w < W)[None, :]
    rates = _rates(A_ptr, n, w, W, N)
    if PACKED:
        begin = tl.load(cu_ptr + b).to(tl.int32)
        slot = begin // CHUNK + b
        chunks = tl.cdiv(tl.load(cu_ptr + b + 1).to(tl.int32) - begin, CHUNK)
    else:
        chunks = tl.cdiv(T, CHUNK)
        slot = b * chunks
    own = b.to(tl.int64) * W * N + w[None, :] * N + n[:, None]
    state = tl.load(first_ptr + own, mask=inside, other=0.0)
    for i in range(0, chunks):
        here = (slot + i).to(tl.int64)
        place = part_ptr + (here * N + n[:, None]) * W + w[None, :]
        part = tl.load(place, mask=inside, other=0.0)
        total = tl.load(total_ptr + here * W + w, mask=w < W, other=0.0)
        tl.store(place, state, mask=inside)
        state = tl.exp2(total[None, :] * rates) * state + part
    tl.store(last_ptr + own, state, mask=inside)


# fmt: off
@triton.jit(do_not_specialize=["T", "B"])
def _outputs(
    x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, A_ptr, D_ptr, bias_ptr, part_ptr, y_ptr, cu_ptr,
    x_strides, dt_strides, B_strides, C_strides, z_strides, T, B,
    W: tl.constexpr, N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, PACKED: tl.constexpr,
):
    # fmt: on
    """Walks a chunk from the state before it."""
    slot = tl.program_id(0)
    b, length, first, start = part_of(slot, cu_ptr, T, B, CHUNK, PACKED)
    if start >= length:
        return
    n, w = tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    in_n, in_w = n < N, w < W
    rates, bias = _rates(A_ptr, n, w, W, N), _biases(bias_ptr, w, W, HAS_BIAS, BLOCK_W)
    skip = _biases(D_ptr, w, W, HAS_D, BLOCK_W)
    b = b.to(tl.int64)
    row = first + start
    x_ptr += b * x_strides[0] + row * x_strides[1] + w
    dt_ptr += b * dt_strides[0] + row * dt_strides[1] + w
    B_ptr += b * B_strides[0] + row * B_strides[1] + n
    C_ptr += b * C_strides[0] + row * C_strides[1] + n
    z_ptr += b * z_strides[0] + row * z_strides[1] + w
    y_ptr += ((0 if PACKED else b * T) + row) * W + w
    place = slot.to(tl.int64) * N + n.to(tl.int64)
    state = tl.load(part_ptr + place[:, None] * W + w[None, :], mask=in_n[:, None] & in_w[None, :], other=0.0)
    for _ in range(0, tl.minimum(CHUNK, length - start)):
        dt = _step_of(dt_ptr, bias, in_w, SOFTPLUS)
        x = tl.load(x_ptr, mask=in_w, other=0.0).to(tl.float32)
        own = tl.load(B_ptr, mask=in_n, other=0.0).to(tl.float32)
        state = tl.exp2(dt[None, :] * rates) * state + (dt * x)[None, :] * own[:, None]
        y = tl.sum(state * tl.load(C_ptr, mask=in_n, other=0.0).to(tl.float32)[:, None], 0)
        if HAS_D:
            y += skip * x
        if HAS_Z:
            y *= silu(tl.load(z_ptr, mask=in_w, other=0.0).to(tl.float32))
            z_ptr += z_strides[1]
        tl.store(y_ptr, y.to(y_ptr.dtype.element_ty), mask=in_w)
        x_ptr += x_strides[1]
        dt_ptr += dt_strides[1]
        B_ptr += B_strides[1]
        C_ptr += C_strides[1]
        y_ptr += W


# fmt: off
@triton.jit
def _scan_step(
    state_ptr, x_ptr, dt_ptr, B_ptr, C_ptr, z_ptr, A_ptr, D_ptr, bias_ptr, slots_ptr, y_ptr,
    state_strides, x_strides, dt_strides, B_strides, C_strides, z_strides, slots_stride,
    W: tl.constexpr, N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_SLOTS: tl.constexpr,
):
    # fmt: on
    """Reads one token of a sequence, and changes a block of channels of its state."""
    s = tl.program_id(0).to(tl.int64)
    n, w = tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    in_n, in_w = n < N, w < W
    far = w.to(tl.int64)
    inside = in_w[:, None] & in_n[None, :]
    row = tl.load(slots_ptr + s * slots_stride).to(tl.int64) if HAS_SLOTS else s
    place = state_ptr + row * state_strides[0] + far[:, None] * state_strides[1] + n[None, :].to(tl.int64) * state_strides[2]
    state = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    rates = tl.load(A_ptr + w[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32) * LOG2_E
    bias = _biases(bias_ptr, w, W, HAS_BIAS, BLOCK_W)
    dt = _step_of(dt_ptr + s * dt_strides[0] + far * dt_strides[1], bias, in_w, SOFTPLUS)
    x = tl.load(x_ptr + s * x_strides[0] + far * x_strides[1], mask=in_w, other=0.0).to(tl.float32)
    own = tl.load(B_ptr + s * B_strides[0] + n * B_strides[1], mask=in_n, other=0.0).to(tl.float32)
    state = tl.exp2(dt[:, None] * rates) * state + (dt * x)[:, None] * own[None, :]
    tl.store(place, state.to(state_ptr.dtype.element_ty), mask=inside)
    y = tl.sum(state * tl.load(C_ptr + s * C_strides[0] + n * C_strides[1], mask=in_n, other=0.0).to(tl.float32)[None, :], 1)
    if HAS_D:
        y += _biases(D_ptr, w, W, HAS_D, BLOCK_W) * x
    if HAS_Z:
        y *= silu(tl.load(z_ptr + s * z_strides[0] + far * z_strides[1], mask=in_w, other=0.0).to(tl.float32))
    tl.store(y_ptr + s * W + w, y.to(y_ptr.dtype.element_ty), mask=in_w)


_start_states, _start_scan, _start_outputs = Kernel(_chunk_states), Kernel(_scan), Kernel(_outputs)
_start_step = Kernel(_scan_step)
# channels of a step's program
_STEP_CHANNELS = 128


@cache
def constants_of(W: int, N: int, block: int, warps: int, **own: bool) -> dict[str, Any]:
    """One dictionary for the same arguments: a launch is recognised by it."""
    return {"W": W, "N": N, "BLOCK_W": block, "BLOCK_N": triton.next_power_of_2(N), **own, "num_warps": warps}


def refusal(tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> str | None:
    """Says why the kernels do not run such tensors, or None."""
    x, _, B, *_ = tokens
    assert x is not None and B is not None
    if B.ndim > x.ndim:
        return f"B {tuple(B.shape)} in groups; has B and C that serve all channels"
    if not 1 <= state.shape[-1] <= LARGEST_N:
        return f"states of {state.shape[-1]} numbers; has 1 to {LARGEST_N}"
    return unknown_dtype(x, state)


step_refusal = refusal


def forward(
    tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns contiguous outputs in the dtype of x, and the last state of each sequence."""
    x, dt, B, C, z = (None if x is None else readable(x) for x in tokens)
    A, D, bias = (None if x is None else x.contiguous() for x in constants)
    assert x is not None and dt is not None and B is not None and C is not None and A is not None
    (W, N), T, count, packed = A.shape, x.shape[-2], state.shape[0], cu is not None
    y, first = torch.empty(x.shape, dtype=x.dtype, device=x.device), state.contiguous()
    last, size, blocks = torch.empty_like(first), CHUNK.value, triton.cdiv(W, _CHANNELS)
    slots = T // size + count if packed else triton.cdiv(T, size) * count
    part = torch.empty((slots, N, W), dtype=torch.float32, device=x.device)
    total = torch.empty((slots, W), dtype=torch.float32, device=x.device)
    # any tensor stands for one that is not there
    z_or, D_or, bias_or, offsets = x if z is None else z, A if D is None else D, A if bias is None else bias, x if cu is None else cu
    flags = {"SOFTPLUS": bool(options[0]), "HAS_BIAS": bias is not None, "PACKED": packed}
    strides = [token_strides(given, packed) for given in (x, dt, B, C, z_or)]
    if y.numel():
        own = constants_of(W, N, _CHANNELS, 1, **flags)
        _start_states((slots, blocks, 1), (x, dt, B, A, bias_or, part, total, offsets, *strides[:3], T, count), own)
    if last.numel():
        _start_scan((count, blocks, 1), (part, total, A, first, last, offsets, T), constants_of(W, N, _CHANNELS, 1, PACKED=packed))
    if y.numel():
        own = constants_of(W, N, _CHANNELS, 1, HAS_D=D is not None, HAS_Z=z is not None, **flags)
        arguments = (x, dt, B, C, z_or, A, D_or, bias_or, part, y, offsets, *strides, T, count)
        _start_outputs((slots, blocks, 1), arguments, own)
    return y, last


def step(state: Tensor, tokens: Tensors, constants: Tensors, slots: Tensor | None, options: Given) -> Tensor:
    """Reads one token of each sequence, changes the states in place, and returns contiguous outputs."""
    x, dt, B, C, z = tokens
    A, D, bias = (None if x is None else x.contiguous() for x in constants)
    assert x is not None and dt is not None and B is not None and C is not None and A is not None
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        own = constants_of(
            *A.shape, _STEP_CHANNELS, 4, SOFTPLUS=bool(options[0]), HAS_BIAS=bias is not None, HAS_D=D is not None,
            HAS_Z=z is not None, HAS_SLOTS=slots is not None,
        )  # fmt: skip
        arguments = (
            state, x, dt, B, C, x if z is None else z, A, A if D is None else D, A if bias is None else bias,
            x if slots is None else slots, y,
            state.stride(), x.stride(), dt.stride(), B.stride(), C.stride(), x.stride() if z is None else z.stride(),
            0 if slots is None else slots.stride(0),
        )  # fmt: skip
        _start_step((x.shape[0], triton.cdiv(A.shape[0], _STEP_CHANNELS), 1), arguments, own)
    return y


# plain operations compute the gradients
backward = None
