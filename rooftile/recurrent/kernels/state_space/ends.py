"""States behind tokens, and gradients of those before them, without outputs: what a rank tells the others before it computes more.

Both read x (or the gradient of y) and B (or C) once. There is no product of tokens with tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftile.recurrent.kernels.state_space.call import Call
from rooftile.recurrent.rule import Given, Tensors


def end(tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> Tensor:
    """Returns the states behind tokens (rows, c, ...)."""
    call = Call(tokens, constants, state, None, options)
    if not call.x.numel() or not state.numel():
        return state.clone()
    call.prepare_steps()
    return call.end(state.contiguous(), call.x)


def end_with_map(tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> tuple[Tensor, Tensor]:
    """Returns the products of decays (rows, H) over tokens (rows, c, ...), and the states behind them."""
    call = Call(tokens, constants, state, None, options)
    if not call.x.numel() or not state.numel():
        return state.new_ones(state.shape[:2]), state.clone()
    call.prepare_steps()
    last = call.end(state.contiguous(), call.x)
    assert call.decay is not None
    return call.decay.view(call.count, -1, call.H).sum(1).exp2(), last


def begin(dy: Tensor, d_last: Tensor, tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> Tensor:
    """Returns the gradients of the states before tokens (rows, c, ...)."""
    z = tokens[-1]
    if z is not None:
        # the gradient of y before the gate
        dy = (F.silu(z.to(torch.float32)) * dy).to(dy.dtype)
    call = Call((*tokens[:-1], None), constants, state, None, options, dy.contiguous())
    if not call.x.numel() or not state.numel():
        return d_last.to(state.dtype, copy=True)
    call.prepare_steps()
    assert call.dy is not None
    return call.end(d_last.contiguous(), call.dy, back=True)
