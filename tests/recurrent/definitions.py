"""The recurrences as loops over tokens, heads and sequences, written from the papers' formulas, without the package."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def sequences(cu: Tensor | None, x: Tensor) -> list[tuple[Any, ...]]:
    """The indices of each sequence's tokens."""
    if cu is None:
        return [(b,) for b in range(x.shape[0])]
    return [(slice(int(a), int(b)),) for a, b in pairwise(cu)]


def ssd(x, dt, A, B, C, *, D=None, z=None, dt_bias=None, softplus_on=True, dt_limit=(0.0, math.inf), state=None, cu=None):
    H = x.shape[-2]
    ys, states = [], []
    for number, own in enumerate(sequences(cu, x)):
        S = [torch.zeros(x.shape[-1], B.shape[-1], dtype=x.dtype) if state is None else state[number, h] for h in range(H)]
        rows = []
        for t in range(x[own].shape[0]):
            heads = []
            for h in range(H):
                group = h * B.shape[-2] // H
                step = dt[own][t, h] + (0 if dt_bias is None else dt_bias[h])
                step = (softplus(step) if softplus_on else step).clamp(*dt_limit)
                S[h] = torch.exp(step * A[h]) * S[h] + step * torch.outer(x[own][t, h], B[own][t, group])
                y = S[h] @ C[own][t, group]
                y = y if D is None else y + D[h] * x[own][t, h]
                heads.append(y if z is None else y * silu(z[own][t, h]))
            rows.append(torch.stack(heads))
        ys.append(torch.stack(rows) if rows else torch.zeros(0, *x.shape[-2:], dtype=x.dtype))
        states.append(torch.stack(S))
    return torch.stack(ys) if cu is None else torch.cat(ys), torch.stack(states)


def selective_scan(x, dt, A, B, C, *, D=None, z=None, dt_bias=None, softplus_on=True, state=None, cu=None):
    ys, states = [], []
    for number, own in enumerate(sequences(cu, x)):
        h = torch.zeros_like(A) if state is None else state[number]
        rows = []
        for t in range(x[own].shape[0]):
            step = dt[own][t] + (0 if dt_bias is None else dt_bias)
            step = softplus(step) if softplus_on else step
            h = torch.exp(step[:, None] * A) * h + torch.outer(step * x[own][t], B[own][t])
            y = h @ C[own][t]
            y = y if D is None else y + D * x[own][t]
            rows.append(y if z is None else y * silu(z[own][t]))
        ys.append(torch.stack(rows) if rows else torch.zeros(0, x.shape[-1], dtype=x.dtype))
        states.append(h)
    return torch.stack(ys) if cu is None else torch.cat(ys), torch.stack(states)


def causal_conv(x, weight, bias=None, *, activation="silu", tail=None, cu=None):
    K = weight.shape[1]
    ys, tails = [], []
    for number, own in enumerate(sequences(cu, x)):
        before = torch.zeros(K - 1, x.shape[-1], dtype=x.dtype) if tail is None else tail[number].T
        inputs = torch.cat([before, x[own]])
        rows = []
        for t in range(x[own].shape[0]):
            y = (inputs[t : t + K] * weight.T).sum(0)
            y = y if bias is None else y + bias
            rows.append(silu(y) if activation else y)
        ys.append(torch.stack(rows) if rows else torch.zeros(0, x.shape[-1], dtype=x.dtype))
        tails.append(inputs[len(inputs) - (K - 1) :].T)
    return torch.stack(ys) if cu is None else torch.cat(ys), torch.stack(tails)


def gated_delta(q, k, v, g, beta, *, scale=None, qk_norm=True, state=None, cu=None):
    Dk, Dv, Hv = q.shape[-1], v.shape[-1], v.shape[-2]
    scale = Dk**-0.5 if scale is None else scale
    ys, states = [], []
    for number, own in enumerate(sequences(cu, q)):
        S = [torch.zeros(Dk, Dv, dtype=q.dtype) if state is None else state[number, h] for h in range(Hv)]
        rows = []
        for t in range(q[own].shape[0]):
            heads = []
            for h in range(Hv):
                q_t, k_t = (a[own][t, h * q.shape[-2] // Hv] for a in (q, k))
                if qk_norm:
                    q_t, k_t = (a / torch.sqrt((a * a).sum() + 1e-6) for a in (q_t, k_t))
                decay = torch.exp(g[own][t, h])
                # S_t = a S (1 - b k k^T) + b v k^T, transposed
                S[h] = decay[:, None] * S[h] if decay.ndim else decay * S[h]
                S[h] = S[h] - beta[own][t, h] * torch.outer(k_t, k_t @ S[h]) + beta[own][t, h] * torch.outer(k_t, v[own][t, h])
                heads.append(scale * (q_t @ S[h]))
            rows.append(torch.stack(heads))
        ys.append(torch.stack(rows) if rows else torch.zeros(0, Hv, Dv, dtype=q.dtype))
        states.append(torch.stack(S))
    return torch.stack(ys) if cu is None else torch.cat(ys), torch.stack(states)
