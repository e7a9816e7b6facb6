"""The state-space model of Mamba-2 in Triton kernels, for Ampere and newer.

    call             the sizes and tiles of a call, and what forward and backward compute first
    tiles            a program's segment, steps and sums of exponents, C B^T of each group
    states           states of segments and chunks, and their gradients
    outputs          each segment walked with its state on the chip
    backward         the gradients: chunk states forward, their gradients back, then every chunk by itself
    gradients        a chunk's gradients, the heads of a group one after another

Where batch and heads fill the chip, a segment is a whole sequence. C B^T is computed once for a group of heads, not once for a
head. Every sum has one owner and one order: results are the same bits from run to run, and no sequence knows its neighbours. A
NaN or infinity reaches the rows of its chunk (64 tokens at most) before its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.recurrent.kernels.parts import unknown_dtype
from rooftile.recurrent.kernels.state_space.backward import backward
from rooftile.recurrent.kernels.state_space.call import Call, some
from rooftile.recurrent.kernels.state_space.outputs import _outputs
from rooftile.recurrent.kernels.state_space_step import step, step_refusal
from rooftile.recurrent.rule import Given, Tensors
from rooftile.runtime.launch import Kernel

_start_outputs = Kernel(_outputs)
__all__ = ["backward", "forward", "refusal", "step", "step_refusal"]

LARGEST_HEAD = 1024


def refusal(tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> str | None:
    """Says why the kernels do not run such tensors, or None."""
    x = tokens[0]
    assert x is not None
    P, N = state.shape[-2:]
    if (reason := unknown_dtype(x, state)) is not None:
        return reason
    largest = 128 if x.dtype == torch.float32 else 256
    if largest < N or P > LARGEST_HEAD:
        return f"{x.dtype} with P {P} and N {N}; has P up to {LARGEST_HEAD} and N up to {largest}"
    return None


def forward(tokens: Tensors, constants: Tensors, state: Tensor, cu: Tensor | None, options: Given) -> tuple[Tensor, Tensor]:
    """Returns y in the dtype of x, and the last states."""
    call = Call(tokens, constants, state, cu, options)
    x, state = call.x, state.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # a sequence without tokens keeps its state
    last = state.clone() if call.packed or not call.T else torch.empty_like(state)
    if not y.numel() or not state.numel():
        return y.zero_(), last
    call.prepare()
    skip, d_strides = call.skip
    own = some(_start_outputs, call.key, GATED=call.z is not None, SKIP=call.D is not None, WHOLE=call.whole)
    arguments = (
        x, call.B, call.C, x if call.z is None else call.z, skip, call.cb, call.steps[0], call.steps[1], call.starts(state, x), y,
        last, call.cu, call.strides(x), call.strides(call.B), call.strides(call.C), call.strides(call.z), d_strides, call.T,
        call.count, call.size, call.slots,
    )  # fmt: skip
    _start_outputs((call.slots, call.H, call.parts), arguments, own)
    return y, last
