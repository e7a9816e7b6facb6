"""The state-space model of Mamba-2 in Triton kernels, for Ampere and newer, and in Gluon for Hopper.

    call                 the sizes and tiles of a call, and what forward and backward compute first
    tiles                a program's segment, steps and sums of exponents, C B^T of each group
    states               states of segments and chunks, and their gradients
    forward_pass, outputs    each segment walked with its state on the chip
    backward_pass        chunk states forward, their gradients back, then every chunk by itself
    gradients            a chunk's gradients, the heads of a group one after another
    step_gradients       what is summed for the steps and rates of decay
    gate                 the gradient of the gate
    ends                 the states at the ends of tokens, without outputs
    launch_hopper, outputs_hopper, gradients_hopper    outputs and gradients for heads of 64 on Hopper, in Gluon

Where batch and heads fill the chip, a segment is a whole sequence. C B^T is computed once for a group of heads, not once for a
head. Every sum has one owner and one order: results are the same bits from run to run, and no sequence knows its neighbours. A
NaN or infinity reaches the rows of its chunk (64 tokens at most) before its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.recurrent.kernels.parts import unknown_dtype
from rooftile.recurrent.kernels.state_space.backward_pass import backward
from rooftile.recurrent.kernels.state_space.ends import begin, end, end_with_map
from rooftile.recurrent.kernels.state_space.forward_pass import forward
from rooftile.recurrent.kernels.state_space_step import step, step_refusal
from rooftile.recurrent.rule import Given, Tensors

__all__ = ["backward", "begin", "end", "end_with_map", "forward", "refusal", "step", "step_refusal"]

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
