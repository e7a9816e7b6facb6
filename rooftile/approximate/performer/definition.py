"""The definition of Performer's attention: weights that random features give in place of the exponential.

    x_i = sqrt(scale) q_i,  y_j = sqrt(scale) k_j          scale = D^-1/2, so each side takes D^-1/4
    A_ij = phi(x_i) . phi(y_j)
    o_i = sum_j A_ij v_j / sum_j A_ij                      over the keys that i sees

    positive        phi(x) = m^-1/2 exp(-|x|^2 / 2) [exp(w_f . x)]
    hyperbolic      phi(x) = m^-1/2 exp(-|x|^2 / 2) [exp(w_f . x), exp(-w_f . x)]              m / 2 rows w_f
    trigonometric   phi(x) = (m / 2)^-1/2 exp(|x|^2 / 2) [cos w_f . x, sin w_f . x]            m / 2 rows w_f
    relu            phi(x) = m^-1/2 max(w_f . x, 0)

There is no epsilon, so a factor per row of A cancels, and each row is scaled by its own largest weight: no row depends on keys
that it does not see. A row whose weights are all 0 gives 0.

Choromanski et al., Rethinking Attention with Performers, arXiv:2009.14794, sections 2.2 to 2.4.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftile.exact.reference.seen import weighted_sum

KINDS = ("positive", "hyperbolic", "trigonometric", "relu")


def phi(x: Tensor, projection: Tensor, kind: str) -> Tensor:
    """The features (..., m) of x (..., D), as the formulas above say."""
    p = x @ projection.T
    half = 0.5 * x.square().sum(-1, keepdim=True)
    if kind == "relu":
        return p.relu() / p.shape[-1] ** 0.5
    if kind == "trigonometric":
        return half.exp() * torch.cat((p.cos(), p.sin()), -1) / p.shape[-1] ** 0.5
    if kind == "hyperbolic":
        p = torch.cat((p, -p), -1)
    return (p - half).exp() / p.shape[-1] ** 0.5


def performer(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    causal: bool,
    projection: Tensor,  # (rows, D)
    kind: str,
    *,
    scale: float,
    state: tuple[Tensor, Tensor, Tensor] | None = None,  # (B, Hk, F, Dv), (B, Hk, F), (B, Hk)
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Returns o (B, T, H, Dv) and the last state. Computes in fp32, or in fp64 for fp64 inputs; o has the dtype of q.

    A state holds the sums of exp(-largest) phi(y_j) v_j^T and exp(-largest) phi(y_j), phi without its constant factor.
    """
    group, T = q.shape[2] // k.shape[2], q.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    x, y, values, w = q.to(wide) * scale**0.5, k.to(wide) * scale**0.5, v.to(wide), projection.detach().to(wide)
    last = _last_state(y, values, w, kind, state)
    y, values = (each.repeat_interleave(group, 2) for each in (y, values))
    visible = torch.ones(T, y.shape[1], dtype=torch.bool, device=q.device)
    visible = visible.tril() if causal else visible
    core, log = _weights(x, y, w, kind)  # (B, H, T, S): the weights are core exp(log)
    log = log.masked_fill(~visible, -math.inf)
    pivot = log.detach().amax(-1) if y.shape[1] else log.new_full(log.shape[:-1], -math.inf)
    if state is not None:
        past, past_log = _to_state(x, w, kind, state[2].repeat_interleave(group, 1))  # (B, H, T, F)
        pivot = torch.maximum(pivot, past_log.detach().amax(-1))
    pivot = pivot.masked_fill(pivot == -math.inf, 0.0)[..., None]
    a = (core * (log - pivot).exp()).masked_fill(~visible, 0.0)
    n, den = weighted_sum(a, values, visible), a.sum(-1).transpose(1, 2)  # (B, T, H, Dv), (B, T, H)
    if state is not None:
        past = past * (past_log - pivot).exp()
        n = n + torch.einsum("bhtf,bhfd->bthd", past, state[0].repeat_interleave(group, 1))
        den = den + torch.einsum("bhtf,bhf->bth", past, state[1].repeat_interleave(group, 1))
    empty = (den == 0)[..., None]
    return (n / den[..., None].masked_fill(empty, 1.0)).masked_fill(empty, 0.0).to(q.dtype), last


def _weights(x: Tensor, y: Tensor, w: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A_ij for all pairs, each (B, H, T, S), as a factor and the logarithm of another; constants that cancel are left out."""
    p_x, p_y = (x @ w.T).transpose(1, 2), (y @ w.T).transpose(1, 2)  # (B, H, T | S, rows)
    half = 0.5 * y.square().sum(-1).transpose(1, 2)[:, :, None]  # (B, H, 1, S)
    if kind == "relu":
        a = p_x.relu() @ p_y.relu().mT
        return a, torch.zeros_like(a)
    if kind == "trigonometric":
        a = torch.cos(p_x[:, :, :, None] - p_y[:, :, None]).sum(-1)
        return a, half.expand_as(a)
    sums = p_x[:, :, :, None] + p_y[:, :, None]  # (B, H, T, S, rows)
    sums = torch.cat((sums, -sums), -1) if kind == "hyperbolic" else sums
    log = sums.logsumexp(-1) - half
    return torch.ones_like(log), log


def _to_state(x: Tensor, w: Tensor, kind: str, largest: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of a state's features for each query, (B, H, T, F), as a factor and the logarithm of another."""
    p = (x @ w.T).transpose(1, 2)
    past = largest[..., None, None]
    if kind == "relu":
        return p.relu(), torch.zeros_like(p)
    if kind == "trigonometric":
        return torch.cat((p.cos(), p.sin()), -1), past.expand(*p.shape[:-1], 2 * p.shape[-1])
    p = torch.cat((p, -p), -1) if kind == "hyperbolic" else p
    return torch.ones_like(p), p + past


def _last_state(
    y: Tensor, v: Tensor, w: Tensor, kind: str, state: tuple[Tensor, Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums over all keys, relative to the largest of them."""
    p, half = y @ w.T, 0.5 * y.square().sum(-1)
    B, S, Hk = y.shape[:3]
    if kind == "relu":
        f, log = p.relu(), torch.zeros_like(half)
    elif kind == "trigonometric":
        f, log = torch.cat((p.cos(), p.sin()), -1), half
    else:
        p = torch.cat((p, -p), -1) if kind == "hyperbolic" else p
        # the largest of a key's features is a constant
        top = p.detach().amax(-1)
        f, log = (p - top[..., None]).exp(), top - half
    largest = torch.full((B, Hk), -math.inf, dtype=y.dtype, device=y.device) if state is None else state[2]
    before = largest
    if S and kind != "relu":
        largest = torch.maximum(largest, log.detach().amax(1))
    f = f * (log - (0.0 if kind == "relu" else largest[:, None])).exp()[..., None]
    sums, z = torch.einsum("bshf,bshd->bhfd", f, v), f.sum(1)
    if state is not None:
        keep = torch.ones_like(before) if kind == "relu" else (before - largest.clamp(min=-1e30)).exp()
        sums, z = sums + keep[..., None, None] * state[0], z + keep[..., None] * state[1]
    return sums, z, largest
