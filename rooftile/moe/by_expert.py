"""The experts on sorted rows, forward and backward, in plain operations: for CPUs, for fp64, and where Triton does not run.

    x = u by rows    p = x up^T    a = act(p)    z = a down^T    y_t = sum over k of g_tk z_tk, in the order of the choices

A forward keeps p. The backward makes a again, and needs no z: with e = dy down, by rows,

    dg = <a, e>    dp = act'(p) (g e)    du_t = sum over k of (dp up)    d_up = dp^T x    d_down = dy^T (g a)

The shared network is the same with one expert, whose gate is 1 or a sigmoid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.moe.activations import activated, gradient
from rooftile.moe.problem import ELSEWHERE, Options, QuantisedWeights, Weights
from rooftile.moe.products import bias_gradient, elementwise, multiply, one_weight, weight_gradient
from rooftile.moe.quantised import experts_in
from rooftile.moe.sorting import Sorted, sort

Activate = Callable[[Tensor, Options], Tensor]
Through = Callable[[Tensor, Tensor, Tensor | None, Options], tuple[Tensor, Tensor, Tensor]]


class Gradients(NamedTuple):
    """The gradients of tokens, gates and weights; None where there is no such weight, or none is wanted."""

    u: Tensor
    gates: Tensor
    up: Tensor | None = None
    down: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    shared_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_gate: Tensor | None = None


def forward(
    u: Tensor, chosen: Tensor, gates: Tensor, weights: Weights | QuantisedWeights, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """y (N, d) in the dtype of u, the products before the activation of sorted rows (N K, 2 h), and the shared one (N, 2 s)."""
    if chosen.device.type != "cpu":
        # rows of no expert here become rows of the first, without weight: these products know no others
        elsewhere = chosen == ELSEWHERE
        chosen, gates = chosen.masked_fill(elsewhere, 0), gates.masked_fill(elsewhere, 0.0)
    rows = sort(chosen, experts_in(weights))
    p = multiply(u[rows.tokens], weights.up, weights.up_bias, rows, options.deterministic)
    z = multiply(_activated(p, options), weights.down, weights.down_bias, rows, options.deterministic)
    y = _summed(rows.back(z).unflatten(0, chosen.shape), gates)
    z_shared, shared = shared_forward(u, weights, options, gates.dtype)
    if z_shared is not None:
        y += z_shared
    return y.to(u.dtype), p, shared


def shared_forward(
    u: Tensor, weights: Weights | QuantisedWeights, options: Options, wide: torch.dtype, activate: Activate | None = None
) -> tuple[Tensor | None, Tensor]:
    """The shared network's output (N, d), in the wide dtype if it is gated, and its products before the activation (N, 2 s).

    Without a shared network there is None, and no column.
    """
    if weights.shared_up is None or weights.shared_down is None:
        return None, u.new_empty((u.shape[0], 0))
    shared = one_weight(u, weights.shared_up, options.deterministic)
    z = one_weight((activate or _activated)(shared, options), weights.shared_down, options.deterministic)
    return z if weights.shared_gate is None else z * _shared_gate(u, weights.shared_gate, wide, options), shared


def backward(
    dy: Tensor, p: Tensor, shared: Tensor, u: Tensor, chosen: Tensor, gates: Tensor, weights: Weights, options: Options,
    needs_weights: bool,
) -> Gradients:  # fmt: skip
    """The gradients of everything that has one; the weights' gradients only if they are wanted."""
    rows = sort(chosen, weights.up.shape[0])
    dy = dy.to(u.dtype)
    du, dgates, found = _routed_gradients(dy, p, u, gates, rows, weights, options, needs_weights)
    du_shared, found_shared = shared_gradients(dy, shared, u, weights, options, gates.dtype, needs_weights)
    if du_shared is not None:
        du += du_shared
    return Gradients(du.to(u.dtype), dgates, **found, **found_shared)


def _routed_gradients(
    dy: Tensor, p: Tensor, u: Tensor, gates: Tensor, rows: Sorted, weights: Weights, options: Options, needs_weights: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The gradients of the tokens, in the dtype of the gates, of the gates, and of the routed experts' weights."""
    dz, g = dy[rows.tokens], gates.flatten()[rows.order][:, None]
    dg, ga, dp = _through(p, multiply(dz, weights.down.mT, None, rows, options.deterministic), g, options)
    dg = dg[:, 0]
    if weights.down_bias is not None:
        dg = dg + (dz.to(gates.dtype) * weights.down_bias[rows.experts.long()].to(gates.dtype)).sum(-1)
    dx = multiply(dp, weights.up.mT, None, rows, options.deterministic)
    du = _summed(rows.back(dx).unflatten(0, gates.shape), None, gates.dtype)
    found: dict[str, Tensor] = {}
    if needs_weights:
        found["up"] = weight_gradient(dp, u[rows.tokens], weights.up, rows)
        found["down"] = weight_gradient(dz, ga, weights.down, rows)
        if weights.up_bias is not None:
            found["up_bias"] = bias_gradient(dp, weights.up_bias, rows)
        if weights.down_bias is not None:
            found["down_bias"] = bias_gradient((g * dz).to(u.dtype), weights.down_bias, rows)
    return du, rows.back(dg).view(gates.shape), found


def shared_gradients(
    dy: Tensor, p: Tensor, u: Tensor, weights: Weights, options: Options, wide: torch.dtype, needs_weights: bool,
    through: Through | None = None,
) -> tuple[Tensor | None, dict[str, Tensor]]:  # fmt: skip
    """The gradient (N, d) of the tokens through the shared network, None without one, and the gradients of its weights."""
    up, down, gate = weights.shared_up, weights.shared_down, weights.shared_gate
    if up is None or down is None:
        return None, {}
    s = None if gate is None else _shared_gate(u, gate, wide, options)
    dg, ga, dp = (through or _through)(p, one_weight(dy, down.mT, options.deterministic), s, options)
    du = one_weight(dp, up.mT, options.deterministic)
    found: dict[str, Tensor] = {}
    if gate is not None and s is not None:
        # the gradient of the gate's logit
        dl = dg * s * (1 - s)
        du = du + dl * gate.to(wide)
        if needs_weights:
            found["shared_gate"] = (dl.mT @ u.to(wide))[0].to(gate.dtype)
    if needs_weights:
        found["shared_up"], found["shared_down"] = dp.mT @ u, dy.mT @ ga
    return du, found


def _through(p: Tensor, e: Tensor, g: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """<a, e> (N, 1) in the dtype of g, and g a and act'(p) (g e) in the dtype of p; g (N, 1) is 1 if it is None."""
    a = activated(p, options.activation)
    if g is None:
        return a[:, :0], a, gradient(p, e, options.activation)
    wide_a, wide_e = a.to(g.dtype), e.to(g.dtype)
    dg = (wide_a * wide_e).sum(-1, keepdim=True)
    return dg, (g * wide_a).to(p.dtype), gradient(p, g * wide_e, options.activation)


def _activated(p: Tensor, options: Options) -> Tensor:
    return elementwise(lambda row: activated(row, options.activation), p, options.deterministic)


def _shared_gate(u: Tensor, gate: Tensor, wide: torch.dtype, options: Options) -> Tensor:
    """The gate (N, 1) of the shared network, in the wide dtype."""
    logit = one_weight(u.to(wide), gate.to(wide)[None], options.deterministic)
    return elementwise(torch.sigmoid, logit, options.deterministic)


def _summed(z: Tensor, gates: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over choices of z (N, K, d), times the gates (N, K) if given: one after the other, so in one order."""
    wide = dtype if gates is None else gates.dtype
    y = torch.zeros((z.shape[0], z.shape[2]), dtype=wide, device=z.device)
    for k in range(z.shape[1]):
        part = z[:, k].to(wide)
        # a product and a sum apart: a CPU joins them in some of its loops and not in others
        y += part if gates is None else part * gates[:, k, None]
    return y
