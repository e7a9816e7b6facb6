"""The functions between the two products of an expert, in fp32 and rounded once, and their gradients.

silu      silu(gate) up                              SwiGLU; the product has gate rows first
clamped   (up + 1) gate sigmoid(1.702 gate)          gpt-oss: gate at most 7, up from -7 to 7
relu2     relu(up)^2                                 Nemotron-H: there is no gate
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS = ("silu", "clamped", "relu2")
LIMIT, SLOPE = 7.0, 1.702


def halves(activation: str) -> int:
    """Returns how many rows of the first weight make a number of the second product's input."""
    return 1 if activation == "relu2" else 2


def activated(x: Tensor, activation: str) -> Tensor:
    """(..., 2 h) to (..., h), and (..., h) to (..., h) for relu2, in the dtype of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if activation == "relu2":
        return wide.relu().square().to(x.dtype)
    gate, up = wide.chunk(2, -1)
    if activation == "silu":
        return (functional.silu(gate) * up).to(x.dtype)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return ((up + 1) * (gate * (SLOPE * gate).sigmoid())).to(x.dtype)


def gradient(x: Tensor, da: Tensor, activation: str) -> Tensor:
    """The gradient of x, from the gradient of its activation, in the dtype of x."""
    wide, da = (each.to(torch.promote_types(x.dtype, torch.float32)) for each in (x, da))
    if activation == "relu2":
        return (2 * da * wide.relu()).to(x.dtype)
    gate, up = wide.chunk(2, -1)
    if activation == "silu":
        s = gate.sigmoid()
        return torch.cat((da * up * s * (1 + gate * (1 - s)), da * gate * s), -1).to(x.dtype)
    # a clamp has a gradient at its limits, too
    gate_moves, up_moves = gate <= LIMIT, up.abs() <= LIMIT
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    s = (SLOPE * gate).sigmoid()
    d_gate = da * (up + 1) * s * (1 + SLOPE * gate * (1 - s))
    return torch.cat((d_gate * gate_moves, da * gate * s * up_moves), -1).to(x.dtype)
