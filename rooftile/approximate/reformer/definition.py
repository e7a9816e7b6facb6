"""The definition of Reformer's attention.

    k_j = q_j / sqrt(|q_j|^2 + 1e-6 D)                           one projection for queries and keys
    h_r(q) = argmax [q R_r; -q R_r]                              the hash of round r, with random R_r
    sort by (h_r, place); s_r(i) is the rank of token i, c_r(i) = floor(s_r(i) / m) its chunk
    i sees j in round r iff j != i, j <= i (if causal), and c_r(j) is c_r(i) or the chunk before, cyclic within the round
    strict: ... iff j < i, h_r(j) = h_r(i), and s_r(i) - m <= s_r(j): the last m earlier tokens of the bucket
    x_ij^r = scale q_i . k_j - ln N_ij                           N_ij: the number of rounds in which i sees j
    lse_i^r, o_i^r = softmax over the keys of round r            and the rounds join: o_i = sum_r exp(lse_i^r - lse_i) o_i^r

Without the term ln N_ij ("counted") a pair counts once per round. A token that sees nothing in any round sees itself, so it
gives its own value.

Kitaev et al., Reformer, arXiv:2001.04451, section 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftile.exact.reference import pairs
from rooftile.exact.reference.merge import merge


def ranks(hashes: Tensor) -> Tensor:
    """s_r(i): the rank of each token when its round is sorted by (hash, place). hashes: (..., T)."""
    order = hashes.sort(dim=-1, stable=True).indices
    return order.sort(dim=-1, stable=True).indices


def sees(hashes: Tensor, chunk: int, causal: bool, strict: bool) -> Tensor:
    """The pairs of each round, (R, B, H, T, T), from hashes (B, T, H, R)."""
    h = hashes.permute(3, 0, 2, 1).long()  # (R, B, H, T)
    T = h.shape[-1]
    s = ranks(h)
    i, j = pairs.positions(T, T, h.device)
    if strict:
        near = (s[..., :, None] - s[..., None, :]) <= chunk
        return near & (h[..., :, None] == h[..., None, :]) & (j < i)
    chunks = max(-(-T // chunk), 1)
    c = s // chunk
    back = (c[..., :, None] - c[..., None, :]) % chunks
    seen = (back <= 1) & (j != i)
    return seen & (j < i) if causal else seen


def unit(x: Tensor) -> Tensor:
    """Vectors of length one, but for the term of the code that trained the paper's models; a vector of zeros stays."""
    return x / (x.square().sum(-1, keepdim=True) + x.shape[-1] * 1e-6).sqrt()


def reformer(
    qk: Tensor,  # (B, T, H, D)
    v: Tensor,  # (B, T, Hk, Dv)
    hashes: Tensor,  # (B, T, H, R)
    *,
    causal: bool,
    chunk: int,
    duplicates: str,
    strict: bool,
    scale: float,
) -> Tensor:
    """Returns o (B, T, H, Dv) in the dtype of the inputs."""
    v = v.repeat_interleave(qk.shape[2] // v.shape[2], dim=2)
    k = unit(qk)
    seen = sees(hashes, chunk, causal, strict)  # (R, B, H, T, T)
    counts = seen.sum(0)  # (B, H, T, T)
    bias = None
    if duplicates == "once":
        bias = -torch.log(counts.clamp(min=1).to(qk.dtype))
    o, lse = merge([pairs.attention(qk, k, v, one, scale=scale, bias=bias) for one in seen])
    return torch.where((lse == -math.inf).mT[..., None], v, o)
