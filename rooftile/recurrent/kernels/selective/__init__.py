"""The selective scan in Triton kernels, for Ampere and newer: up to 32 numbers of a state, without groups of channels.

    call        the sizes of a call, and the states before its chunks
    chunks      the forward
    gradients   the backward, which finds the states of chunks again, and keeps none between the two
    steps       one token of each sequence, in place
    tiles       parts of them

Every sum has one owner and one order: results are the same bits from run to run, and no sequence knows its neighbours.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from rooftile.recurrent.kernels.parts import unknown_dtype
from rooftile.recurrent.kernels.selective.call import (
    adjoints_of,
    by_tokens,
    constants_of,
    prepared,
    states_of,
    tiles_of,
    tokens_of_gradients,
)
from rooftile.recurrent.kernels.selective.chunks import _outputs
from rooftile.recurrent.kernels.selective.gradients import _gradients
from rooftile.recurrent.kernels.selective.steps import _scan_step
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.launch import Kernel

LARGEST_N = 32
# channels of a program of a step
_STEP_CHANNELS = 128

_start_outputs, _start_gradients, _start_step = Kernel(_outputs), Kernel(_gradients), Kernel(_scan_step)


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
    chunks = prepared(tokens, constants, state, cu, bool(options[0]))
    last, x = states_of(chunks, state), chunks.tokens[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        own = by_tokens(*state.shape[1:], HAS_D=constants[1] is not None, HAS_Z=tokens[4] is not None, **chunks.flags)
        tensors = (*chunks.tokens, *chunks.constants, chunks.part, y, chunks.cu)
        _start_outputs((chunks.slots, chunks.blocks, 1), (*tensors, *chunks.strides, x.shape[-2], state.shape[0], 1), own)
    return y, last


def backward(
    dy: Tensor, d_last: Tensor | None, tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of x, dt, B, C, z, A, D and dt_bias, of those that are there, and of the first states."""
    chunks = prepared(tokens, constants, state, cu, bool(options[0]))
    states_of(chunks, state)
    x, dt, B, C, z = chunks.tokens
    (count, W, N), T, wide = state.shape, x.shape[-2], {"dtype": torch.float32, "device": x.device}
    dy, slots, rows = dy.contiguous(), chunks.slots, x.numel() // W if W else 0
    has = {"HAS_Z": tokens[4] is not None, **chunks.flags}
    dx, d_dt, dz, d_first = (torch.empty(like.shape, dtype=like.dtype, device=x.device) for like in (x, dt, z, state))
    # not every slot of a packed batch has tokens
    dA, dD, d_bias = torch.zeros((slots, N, W), **wide), torch.zeros((slots, W), **wide), torch.zeros((slots, W), **wide)
    sums = torch.empty((chunks.blocks, rows, 2, triton.next_power_of_2(N)), **wide)
    rates, D, bias = chunks.constants
    adjoint = adjoints_of(chunks, dy, d_last, d_first, tokens[4] is not None)
    if x.numel():
        starts = torch.empty((tiles_of(chunks), N, W), **wide)
        found = (dx, d_dt, sums, dz, dA, dD, d_bias)
        tensors = (dy, x, dt, B, C, z, rates, D, bias, chunks.part, adjoint, starts, *found, chunks.cu)
        own = by_tokens(W, N, TOKENS=tokens_of_gradients(N), HAS_D=constants[1] is not None, **has)
        _start_gradients((slots, chunks.blocks, 1), (*tensors, *chunks.strides, T, count, 1), own)
    dB, dC = (d[:, :N].reshape(B.shape) for d in sums.sum(0).unbind(1))
    found = (dx, d_dt, dB, dC, dz, dA.sum(0).t(), dD.sum(0), d_bias.sum(0))
    pairs = zip((*tokens, *constants), found, strict=True)
    return [*(d.to(like.dtype).contiguous() for like, d in pairs if like is not None), d_first]


def end(tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> Tensor:
    """Returns the states behind tokens (rows, c, ...)."""
    return states_of(prepared(tokens, constants, state, None, bool(options[0])), state)


def end_with_map(tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> tuple[Tensor, Tensor]:
    """Returns the products of decays (rows, W, N) over tokens (rows, c, ...), and the states behind them."""
    chunks = prepared(tokens, constants, state, None, bool(options[0]))
    last = states_of(chunks, state)
    steps = chunks.total.view(state.shape[0], -1, state.shape[1]).sum(1)
    return (steps[..., None] * chunks.constants[0].t()).exp2(), last


def begin(dy: Tensor, d_last: Tensor, tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> Tensor:
    """Returns the gradients of the states before tokens (rows, c, ...)."""
    chunks = prepared(tokens, constants, state, None, bool(options[0]))
    found = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    adjoints_of(chunks, dy.contiguous(), d_last, found, tokens[4] is not None, total=True)
    return found


def step(state: Tensor, tokens: Tensors, constants: Tensors, slots: Tensor | None, options: Given) -> Tensor:
    """Reads one token of each sequence, changes the states in place, and returns contiguous outputs."""
    x, dt, B, C, z = tokens
    A, D, bias = (None if x is None else x.contiguous() for x in constants)
    assert x is not None and dt is not None and B is not None and C is not None and A is not None
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        own = constants_of(
            *A.shape, _STEP_CHANNELS, 4, BLOCK_N=triton.next_power_of_2(A.shape[1]), SOFTPLUS=bool(options[0]), HAS_BIAS=bias is not None, HAS_D=D is not None,
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
