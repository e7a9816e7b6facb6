"""Routers and experts token by token in Python, written apart from the package: what every test compares with, in fp64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def order(scores: list[float]) -> list[int]:
    """Places by falling score; a tie goes to the lower place."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def routed(
    u: Tensor, centroids: Tensor, active: int, *, score: str = "softmax", normalise: bool = False, scale: float = 1.0,
    bias: Tensor | None = None, logit_bias: Tensor | None = None, groups: int = 1, active_groups: int = 1,
    group_score: str = "maximum",
) -> tuple[list[list[int]], list[list[float]]]:  # fmt: skip
    """The experts of each token (d,), and their gates."""
    experts, gates = [], []
    for token in u.detach().double():
        z = [float(token @ e) for e in centroids.detach().double()]
        z = z if logit_bias is None else [a + float(b) for a, b in zip(z, logit_bias, strict=True)]
        top = max(z)
        total = sum(math.exp(a - top) for a in z)
        s = [1 / (1 + math.exp(-a)) if score == "sigmoid" else math.exp(a - top) / total for a in z]
        ranked = z if score == "chosen softmax" else s
        ranked = ranked if bias is None else [a + float(b) for a, b in zip(ranked, bias, strict=True)]
        size = len(z) // groups
        parts = [ranked[g * size : (g + 1) * size] for g in range(groups)]
        of = [max(part) if group_score == "maximum" else sum(sorted(part)[-2:]) for part in parts]
        allowed = {i for g in order(of)[:active_groups] for i in range(g * size, (g + 1) * size)}
        best = [i for i in order(ranked) if i in allowed][:active]
        g = [s[i] for i in best]
        if score == "chosen softmax":
            of_best = [math.exp(z[i] - z[best[0]]) for i in best]
            g = [a / sum(of_best) for a in of_best]
        if normalise:
            g = [a / sum(g) for a in g]
        experts.append(best)
        gates.append([scale * a for a in g])
    return experts, gates


def feed_forward(x: Tensor, up: Tensor, down: Tensor, activation: str = "silu", up_bias=0.0, down_bias=0.0) -> Tensor:
    """One expert on one token (d,)."""
    p = up @ x + up_bias
    if activation == "relu2":
        return down @ torch.relu(p) ** 2 + down_bias
    h = len(p) // 2
    gate, linear = p[:h], p[h:]
    if activation == "clamped":
        gate, linear = torch.minimum(gate, torch.tensor(7.0)), torch.clamp(linear, -7.0, 7.0)
        return down @ ((linear + 1) * gate / (1 + torch.exp(-1.702 * gate))) + down_bias
    return down @ (gate / (1 + torch.exp(-gate)) * linear) + down_bias


def mixture(
    u: Tensor, experts: Tensor, gates: Tensor, up: Tensor, down: Tensor, *, activation: str = "silu", up_bias=None,
    down_bias=None, shared_up=None, shared_down=None, shared_gate=None,
) -> Tensor:  # fmt: skip
    """u (N, d), experts and gates (N, K) to (N, d), differentiable."""
    rows = []
    for t in range(u.shape[0]):
        y = torch.zeros_like(u[t])
        for k in range(experts.shape[1]):
            e = int(experts[t, k])
            biases = [0.0 if b is None else b[e] for b in (up_bias, down_bias)]
            y = y + gates[t, k] * feed_forward(u[t], up[e], down[e], activation, *biases)
        if shared_up is not None:
            z = feed_forward(u[t], shared_up, shared_down, activation)
            y = y + (z if shared_gate is None else z / (1 + torch.exp(-(shared_gate @ u[t]))))
        rows.append(y)
    return torch.stack(rows) if rows else torch.zeros_like(u)
