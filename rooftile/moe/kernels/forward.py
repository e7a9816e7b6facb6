"""Launches the forward: gate and up rows with their activation, the second product, and the sum over choices."""

from __future__ import annotations

import triton
from torch import Tensor

from rooftile.moe.by_expert import shared_forward
from rooftile.moe.kernels import few_tokens, quantised, tiles
from rooftile.moe.kernels.activations import _activate
from rooftile.moe.kernels.products import _product, _sum_choices
from rooftile.moe.kernels.sorting import sort
from rooftile.moe.kernels.tiles import Way
from rooftile.moe.problem import Options, QuantisedWeights, Weights
from rooftile.moe.quantised import experts_in, rows_in
from rooftile.moe.sorting import Sorted
from rooftile.runtime.launch import Kernel
from rooftile.weights import QuantisedWeight

_start_product, _start_sum, _start_activation = Kernel(_product), Kernel(_sum_choices), Kernel(_activate)


def forward(
    u: Tensor, chosen: Tensor, gates: Tensor, weights: Weights | QuantisedWeights, options: Options, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes what `by_expert.forward` does; the products before the activation are empty unless they are to be kept."""
    if few_tokens.takes(u, chosen, weights, options, keep):
        y = few_tokens.forward(u, chosen, gates, weights, options)
        shared = 0 if weights.shared_up is None else weights.shared_up.shape[0]
        return y, u.new_empty((0, weights.up.shape[1])), u.new_empty((0, shared))
    u, gates = u.contiguous(), gates.contiguous()
    (N, d), K, E, h = u.shape, chosen.shape[1], experts_in(weights), weights.down.shape[-1]
    # the experts of one token need no order, and stand in place of all that is sorted; a backward reads sorted rows
    alone = N == 1 and not keep
    rows = Sorted(*[chosen.contiguous().view(-1)] * 4) if alone else sort(chosen, E)
    p = u.new_empty((N * K if keep else 0, rows_in(weights.up, E)))
    a, z, y = u.new_empty((N * K, h)), u.new_empty((N * K, d)), u.new_empty((N, d))
    shared, shared_p = shared_forward(u, weights, options, gates.dtype, activate)
    if N:
        block_m = tiles.rows_of_tile(N * K, E, u.dtype, options.deterministic)
        first, second = Way(gather=True, alone=alone), Way(scatter=True, alone=alone)
        if isinstance(weights.up, QuantisedWeight):
            quantised.multiply(u, weights.up, weights.up_bias, a, rows, E, block_m, first, options.activation)
        else:
            multiply(u, weights.up, weights.up_bias, a, p if keep else None, rows, block_m, first, options.activation)
        if isinstance(weights.down, QuantisedWeight):
            quantised.multiply(a, weights.down, weights.down_bias, z, rows, E, block_m, second)
        else:
            multiply(a, weights.down, weights.down_bias, z, None, rows, block_m, second)
        constants = tiles.sum_constants(E, K, d, shared is not None)
        arguments = z, gates, z if shared is None else shared.contiguous(), chosen.contiguous(), y
        _start_sum((N, triton.cdiv(d, constants["BLOCK"]), 1), arguments, constants)
    return y, p, shared_p


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, p: Tensor | None, rows: Sorted, block_m: int, way: Way,
    activation: str = "none",
) -> None:  # fmt: skip
    """Writes y, and p if it is given. x has sorted rows, or tokens to gather; y has sorted rows, or is by token and choice."""
    E, large, count = weight.shape[0], tiles.is_large(x.device), rows.order.shape[0]
    constants = tiles.product_constants(
        E, x.shape[1], y.shape[1], activation, x.dtype, large, block_m, bias is not None, p is not None, way
    )
    # no load of the experts has more tiles of rows
    most = count if way.alone else count // block_m + min(E, count)
    arguments = (
        x, weight.contiguous(), x if bias is None else bias.contiguous(), y, y if p is None else p, rows.tokens, rows.order,
        rows.bounds, most,
    )  # fmt: skip
    _start_product((most * triton.cdiv(y.shape[1], constants["BLOCK_N"]), 1, 1), arguments, constants)


def activate(p: Tensor, options: Options) -> Tensor:
    """The activation of the shared network's products, (N, 2 s) to (N, s)."""
    size = p.shape[1] // (1 if options.activation == "relu2" else 2)
    a = p.new_empty((p.shape[0], size))
    if a.numel():
        constants = tiles.activation_constants(size, options.activation)
        _start_activation((p.shape[0], triton.cdiv(size, constants["BLOCK"]), 1), (p, a), constants)
    return a
