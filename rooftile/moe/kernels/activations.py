"""The activation between an expert's two products, and its gradient, in products and by rows.

Functions and gradients equal `rooftile.moe.activations`: NaN stays NaN, and a clamp has a gradient at its limits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activated(gate, up, ACTIVATION: tl.constexpr):
    """Applies the activation; gate is up for relu2."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    if ACTIVATION == "clamped":
        # a comparison keeps NaN, which a minimum would drop
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return (up + 1) * (gate * tl.sigmoid(1.702 * gate))
    gate = tl.where(gate < 0.0, 0.0, gate)
    return gate * gate


@triton.jit
def _gradient(gate, up, da, ACTIVATION: tl.constexpr):
    """Returns the gradients of gate and up, from the gradient of the activation; for relu2 twice the same."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(gate)
        return da * up * s * (1 + gate * (1 - s)), da * gate * s
    if ACTIVATION == "clamped":
        # products with 0 and 1, and no choice: so NaN stays
        gate_moves, up_moves = (gate <= 7.0).to(tl.float32), (tl.abs(up) <= 7.0).to(tl.float32)
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        s = tl.sigmoid(1.702 * gate)
        return da * (up + 1) * s * (1 + 1.702 * gate * (1 - s)) * gate_moves, da * gate * s * up_moves
    d = 2 * da * tl.where(gate < 0.0, 0.0, gate)
    return d, d


@triton.jit
def _activate(p_ptr, a_ptr, S: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """a = act(p): (N, 2 S), gate first, to (N, S), or (N, S) to (N, S) for relu2."""
    TWO: tl.constexpr = ACTIVATION != "relu2"
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = p_ptr + t * ((2 if TWO else 1) * S) + n
    gate = tl.load(p, mask=n < S, other=0.0).to(tl.float32)
    up = tl.load(p + S, mask=n < S, other=0.0).to(tl.float32) if TWO else gate
    tl.store(a_ptr + t * S + n, _activated(gate, up, ACTIVATION).to(a_ptr.dtype.element_ty), mask=n < S)


# fmt: off
@triton.jit
def _activate_backward(
    p_ptr, e_ptr, g_ptr, dp_ptr, dg_ptr, dy_ptr, bias_ptr, tokens_ptr, order_ptr, experts_ptr, bounds_ptr,
    E: tl.constexpr, S: tl.constexpr, D: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, ROUTED: tl.constexpr,
    BIAS: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """A row's dp = act'(p) (g e), and, if there is a gate g (else it is 1), dg = <a, e>; with KEEP g a takes the place of e.

    ROUTED: rows are sorted by expert, g and dg are by token and choice, and rows behind the last expert's are left alone. BIAS:
    dg also has <dy, bias of the second product>.
    """
    TWO: tl.constexpr = ACTIVATION != "relu2"
    t = tl.program_id(0).to(tl.int64)
    place = t
    if ROUTED:
        if t >= tl.load(bounds_ptr + E):
            return
        place = tl.load(order_ptr + t)
    g = tl.load(g_ptr + place) if GATED else 1.0
    sums = tl.zeros((BLOCK,), tl.float32)
    for c in range(0, S, BLOCK):
        n = c + tl.arange(0, BLOCK)
        p = t * ((2 if TWO else 1) * S) + n
        gate = tl.load(p_ptr + p, mask=n < S, other=0.0).to(tl.float32)
        up = tl.load(p_ptr + p + S, mask=n < S, other=0.0).to(tl.float32) if TWO else gate
        e = tl.load(e_ptr + t * S + n, mask=n < S, other=0.0).to(tl.float32)
        # rounded as the forward rounds it
        a = _activated(gate, up, ACTIVATION).to(e_ptr.dtype.element_ty).to(tl.float32)
        sums += a * e
        d_gate, d_up = _gradient(gate, up, g * e, ACTIVATION)
        if KEEP:
            tl.store(e_ptr + t * S + n, (g * a).to(e_ptr.dtype.element_ty), mask=n < S)
        tl.store(dp_ptr + p, d_gate.to(dp_ptr.dtype.element_ty), mask=n < S)
        if TWO:
            tl.store(dp_ptr + p + S, d_up.to(dp_ptr.dtype.element_ty), mask=n < S)
    if BIAS:
        token, expert = tl.load(tokens_ptr + t), tl.load(experts_ptr + t)
        for c in range(0, D, BLOCK):
            n = c + tl.arange(0, BLOCK)
            bias = tl.load(bias_ptr + expert * D + n, mask=n < D, other=0.0).to(tl.float32)
            sums += bias * tl.load(dy_ptr + token * D + n, mask=n < D, other=0.0).to(tl.float32)
    if GATED:
        tl.store(dg_ptr + place, tl.sum(sums, 0))
