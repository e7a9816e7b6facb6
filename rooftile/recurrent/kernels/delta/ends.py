"""States behind tokens, and gradients of those before them, without outputs: what a rank tells the others before it computes more.

The matrix that tokens are on the state before them is a walk from the identity with values of zero. It has nothing to do with the
walk of the values, so both are columns of one: a walk waits more than it computes, and takes no longer with more programs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.recurrent.kernels.delta.call import prepared
from rooftile.recurrent.kernels.delta.walks import walk, walk_back
from rooftile.recurrent.rule import Given, Tensors


def end(tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> Tensor:
    """Returns the states behind tokens (rows, c, ...)."""
    return walk(prepared(tokens, state, None, options))


def end_with_map(tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> tuple[Tensor, Tensor]:
    """Returns the matrix (rows, Hv, Dk, Dk) that tokens (rows, c, ...) are on a state, and the states behind them."""
    q, k, v, *others = tokens
    assert v is not None
    (*heads, dim), dim_v = state.shape[:-1], state.shape[-1]
    one = torch.eye(dim, dtype=state.dtype, device=state.device).expand(*heads, dim, dim)
    values = torch.cat((v, v.new_zeros((*v.shape[:-1], dim))), -1)
    found = walk(prepared((q, k, values, *others), torch.cat((state, one), -1), None, options))
    return found[..., dim_v:], found[..., :dim_v]


def begin(dy: Tensor, d_last: Tensor, tokens: Tensors, constants: Tensors, state: Tensor, options: Given) -> Tensor:
    """Returns the gradients of the states before tokens (rows, c, ...)."""
    found = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    walk_back(prepared(tokens, state, None, options), dy.contiguous(), None, None, d_last, found)
    return found
