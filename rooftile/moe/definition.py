"""The experts as defined, in plain operations that autograd, `torch.func` and compilers see: one after the other, on all tokens.

    y = sum_i g_i FFN_i(u) + FFN_shared(u)

A token that did not choose an expert goes through it as zeros, so that nothing which overflows there reaches it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.moe.activations import activated
from rooftile.moe.problem import Weights


def experts(u: Tensor, chosen: Tensor, gates: Tensor, weights: Weights, activation: str) -> Tensor:
    """u (N, d), chosen and gates (N, K) to (N, d) in the dtype of u; the sum is in the dtype of the gates."""
    up, down, up_bias, down_bias, shared_up, shared_down, shared_gate = weights
    y = torch.zeros_like(u, dtype=gates.dtype)
    for e in range(up.shape[0]):
        here = chosen == e  # (N, K)
        is_used = here.any(-1, keepdim=True)
        x = torch.where(is_used, u, 0)
        a = activated(functional.linear(x, up[e], None if up_bias is None else up_bias[e]), activation)
        z = functional.linear(a, down[e], None if down_bias is None else down_bias[e])
        gate = torch.where(here, gates, 0).sum(-1, keepdim=True)
        y = y + torch.where(is_used, gate * z, 0)
    if shared_up is not None and shared_down is not None:
        z = functional.linear(activated(functional.linear(u, shared_up), activation), shared_down).to(gates.dtype)
        if shared_gate is not None:
            z = z * functional.linear(u.to(gates.dtype), shared_gate.to(gates.dtype)[None]).sigmoid()
        y = y + z
    return y.to(u.dtype)
