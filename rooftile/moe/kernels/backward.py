"""Launches the backward: down and the activation, both weights' gradients, and the gradient of tokens summed over choices.

Of M = N K rows of width d and hidden width h, SwiGLU takes 12 M d h FLOPs, twice the forward's, or 6 M d h if no weight needs a
gradient. Each weight is read once, and each weight's gradient written once. Of the rows the kernels write, and read again, e and
then g a in its place, dp and dx: M (4 h + d) numbers. On an H200 the activation takes less time in a kernel of its own than at
the end of the product: a tile of 128 x 256 leaves no registers for it, and smaller tiles wait for L2.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from rooftile.moe.by_expert import Gradients, shared_gradients
from rooftile.moe.kernels import tiles
from rooftile.moe.kernels.activations import _activate_backward
from rooftile.moe.kernels.forward import multiply
from rooftile.moe.kernels.gradients import _bias_gradient, _sum_gradients, _weight_gradient
from rooftile.moe.kernels.sorting import sort
from rooftile.moe.kernels.tiles import Way
from rooftile.moe.problem import Options, Weights
from rooftile.moe.sorting import Sorted
from rooftile.runtime.launch import Kernel

_start_activation, _start_sum = Kernel(_activate_backward), Kernel(_sum_gradients)
_start_weight, _start_bias = Kernel(_weight_gradient), Kernel(_bias_gradient)


def backward(
    dy: Tensor, p: Tensor, shared: Tensor, u: Tensor, chosen: Tensor, gates: Tensor, weights: Weights, options: Options,
    needs_weights: bool,
) -> Gradients:  # fmt: skip
    """Computes what `by_expert.backward` does."""
    u, gates, dy, p, shared = (x.contiguous() for x in (u, gates, dy.to(u.dtype), p, shared))
    (N, d), K, (E, _, h) = u.shape, chosen.shape[1], weights.down.shape
    rows = sort(chosen, E)
    du_shared, found = shared_gradients(dy, shared, u, weights, options, gates.dtype, needs_weights, through)
    # e, and then g a
    e, dp, dx = u.new_empty((N * K, h)), torch.empty_like(p), u.new_empty((N * K, d))
    du, dgates = torch.empty_like(u), torch.empty_like(gates)
    if N:
        block_m = tiles.rows_of_tile(N * K, E, u.dtype, options.deterministic)
        multiply(dy, weights.down, None, e, None, rows, block_m, Way(gather=True, turned=True))
        through_activation(p, e, dp, gates, dgates, dy, weights.down_bias, rows, options, needs_weights)
        multiply(dp, weights.up, None, dx, None, rows, block_m, Way(scatter=True, turned=True))
        constants = tiles.sum_constants(E, K, d, du_shared is not None)
        arguments = dx, dx if du_shared is None else du_shared.contiguous(), chosen.contiguous(), du, dgates
        _start_sum((N, triton.cdiv(d, constants["BLOCK"]), 1), arguments, constants)
    if needs_weights:
        found["up"] = weight_gradient(dp, u, weights.up, rows, left_by_token=False)
        found["down"] = weight_gradient(dy, e, weights.down, rows, left_by_token=True)
        if weights.up_bias is not None:
            found["up_bias"] = bias_gradient(dp, weights.up_bias, None, rows)
        if weights.down_bias is not None:
            found["down_bias"] = bias_gradient(dy, weights.down_bias, gates, rows)
    return Gradients(du, dgates, **found)


def through_activation(
    p: Tensor, e: Tensor, dp: Tensor, gates: Tensor, dgates: Tensor, dy: Tensor, bias: Tensor | None, rows: Sorted,
    options: Options, keep: bool,
) -> None:  # fmt: skip
    """Writes dp and the gates' gradient of the routed rows, and g a in the place of e if it is to be kept."""
    E, d = rows.bounds.shape[0] - 1, dy.shape[1]
    constants = tiles.activation_gradient_constants(
        E, e.shape[1], d, options.activation, gated=True, routed=True, bias=bias is not None, keep=keep
    )
    arguments = (
        p, e, gates, dp, dgates, dy, dy if bias is None else bias.contiguous(), rows.tokens, rows.order, rows.experts,
        rows.bounds,
    )  # fmt: skip
    _start_activation((e.shape[0], 1, 1), arguments, constants)


def weight_gradient(left: Tensor, right: Tensor, weight: Tensor, rows: Sorted, *, left_by_token: bool) -> Tensor:
    """The gradient (E, out, in) of a weight; the left or the right factor has a row for each token, the other for each row."""
    E, size_out, size_in = weight.shape
    found = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    constants = tiles.weight_constants(size_out, size_in, left_by_token, weight.dtype, tiles.is_large(weight.device))
    blocks = triton.cdiv(size_out, constants["BLOCK_M"]) * triton.cdiv(size_in, constants["BLOCK_N"])
    _start_weight((E * blocks, 1, 1), (left, right, rows.tokens, rows.bounds, found), constants)
    return found


def bias_gradient(x: Tensor, bias: Tensor, gates: Tensor | None, rows: Sorted) -> Tensor:
    """The sum (E, out) of each expert's rows x, or with gates of its tokens' rows times their gates."""
    E, size = bias.shape
    found = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    constants = tiles.bias_constants(size, gates is not None)
    arguments = x, x if gates is None else gates, rows.tokens, rows.order, rows.bounds, found
    _start_bias((E, triton.cdiv(size, constants["BLOCK_N"]), 1), arguments, constants)
    return found


def through(p: Tensor, e: Tensor, g: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """For the shared network: <a, e> (N, 1) if there are gates (N, 1), g a in the place of e, and dp."""
    dg, dp, g = e.new_empty((e.shape[0], 1), dtype=torch.float32), torch.empty_like(p), None if g is None else g.contiguous()
    if e.numel():
        constants = tiles.activation_gradient_constants(
            0, e.shape[1], 0, options.activation, gated=g is not None, routed=False, bias=False, keep=True
        )
        _start_activation((e.shape[0], 1, 1), (p, e, e if g is None else g, dp, dg, *[e] * 6), constants)
    return dg, e, dp
