"""Launches the backward: down and the activation, both weights' gradients, and the gradient of tokens summed over choices.

Of M = N K rows of width d and hidden width h (SwiGLU, 2 bytes a number) it multiplies 12 M d h numbers, twice the forward, or
6 M d h if no weight needs a gradient. Each weight is read once and each weight's gradient written once. Of the rows it writes and
reads again what no kernel can pass on: g a and dp, 3 M h numbers, and dx, M d, once each.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from rooftile.moe.by_expert import Gradients, shared_gradients
from rooftile.moe.kernels import tiles
from rooftile.moe.kernels.activations import _activate_backward
from rooftile.moe.kernels.forward import most_tiles, multiply
from rooftile.moe.kernels.gradients import _bias_gradient, _sum_gradients, _through_down, _weight_gradient
from rooftile.moe.kernels.sorting import sort
from rooftile.moe.problem import Options, Weights
from rooftile.moe.sorting import Sorted
from rooftile.runtime.devices import capability
from rooftile.runtime.launch import Kernel

_start_through, _start_weight, _start_bias = Kernel(_through_down), Kernel(_weight_gradient), Kernel(_bias_gradient)
_start_sum, _start_elements = Kernel(_sum_gradients), Kernel(_activate_backward)


def backward(
    dy: Tensor, p: Tensor, shared: Tensor, u: Tensor, chosen: Tensor, gates: Tensor, weights: Weights, options: Options,
    needs_weights: bool,
) -> Gradients:  # fmt: skip
    """Computes what `by_expert.backward` does."""
    u, gates, dy, p, shared = (x.contiguous() for x in (u, gates, dy.to(u.dtype), p, shared))
    (N, d), K, E = u.shape, chosen.shape[1], weights.up.shape[0]
    rows = sort(chosen, E)
    block_m = tiles.rows_of_tile(N * K, E, u.dtype, options.deterministic)
    ga, dp, dg = through_down(dy, p, gates, rows, weights, options, block_m, needs_weights)
    du_shared, found = shared_gradients(dy, shared, u, weights, options, gates.dtype, needs_weights, through)
    dx, du, dgates = u.new_empty((N * K, d)), torch.empty_like(u), torch.empty_like(gates)
    if N:
        multiply(dp, weights.up, None, dx, None, rows, block_m, "none", turned=True)
        constants = tiles.sum_gradients_constants(E, K, d, dg.shape[1], du_shared is not None)
        arguments = dx, dg, dx if du_shared is None else du_shared.contiguous(), chosen.contiguous(), du, dgates
        _start_sum((N, triton.cdiv(d, constants["BLOCK"]), 1), arguments, constants)
    if needs_weights:
        found["up"] = weight_gradient(dp, u, weights.up, rows, left_by_token=False)
        found["down"] = weight_gradient(dy, ga, weights.down, rows, left_by_token=True)
        if weights.up_bias is not None:
            found["up_bias"] = bias_gradient(dp, weights.up_bias, None, rows)
        if weights.down_bias is not None:
            found["down_bias"] = bias_gradient(dy, weights.down_bias, gates, rows)
    return Gradients(du, dgates, **found)


def through_down(
    dy: Tensor, p: Tensor, gates: Tensor, rows: Sorted, weights: Weights, options: Options, block_m: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """g a (N K, h) if it is to be kept, dp in the shape of p, and the parts of the gates' gradient (N K, blocks)."""
    (E, d, h), bias = weights.down.shape, weights.down_bias
    hopper = capability(dy.device) >= (9, 0)
    constants = tiles.through_constants(E, d, h, options.activation, dy.dtype, hopper, block_m, bias is not None, keep)
    count, blocks = most_tiles(rows, E, block_m), triton.cdiv(h, constants["BLOCK_N"])
    dp, dg = torch.empty_like(p), gates.new_empty((p.shape[0], blocks))
    ga = p.new_empty((p.shape[0] if keep else 0, h))
    arguments = (
        dy, weights.down.contiguous(), dy if bias is None else bias.contiguous(), p, gates, ga if keep else dp, dp, dg,
        rows.tokens, rows.order, rows.bounds, count,
    )  # fmt: skip
    if count:
        _start_through((count * blocks, 1, 1), arguments, constants)
    return ga, dp, dg


def weight_gradient(left: Tensor, right: Tensor, weight: Tensor, rows: Sorted, *, left_by_token: bool) -> Tensor:
    """The gradient (E, out, in) of a weight; the left or the right factor has a row for each token, the other for each row."""
    E, size_out, size_in = weight.shape
    found = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    constants = tiles.weight_constants(size_out, size_in, left_by_token, weight.dtype, capability(weight.device) >= (9, 0))
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
    """For the shared network: <a, e> (N, 1) if there are gates (N, 1), g a, and dp."""
    N, size = e.shape
    dg, ga, dp = p.new_empty((N, 1), dtype=torch.float32), torch.empty_like(e), torch.empty_like(p)
    if e.numel():
        constants = tiles.element_constants(size, options.activation, g is not None)
        _start_elements((N, 1, 1), (p, e, e if g is None else g.contiguous(), ga, dp, dg), constants)
    return dg, ga, dp
