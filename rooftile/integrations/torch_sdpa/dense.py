"""SDPA's operators on (B, H, T, D), forward and backward: flash on the CPU and on CUDA, and cuDNN.

Each returns None where PyTorch's own kernel has to run. Causal masks are aligned top-left. Strides and unused outputs are part of
an operator's contract, because Inductor asserts the strides of the stock kernel's fake:

CPU: lse is a view of (B, T, H), the gradients are views of (B, T, H, D).
CUDA: o and the gradients are laid out like their inputs, and lse (B, H, T) is contiguous; cuDNN's is (B, H, T, 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.exact.masks import CAUSAL, FULL
from rooftile.exact.spec import Options
from rooftile.integrations.torch_sdpa import route
from rooftile.integrations.torch_sdpa.route import laid_out_like, refuse, unused


def cpu_forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    if attn_mask is not None:
        return refuse("attn_mask")
    found = _forward(query, key, value, dropout_p, is_causal, scale)
    if found is None:
        return None
    o, lse = found
    return laid_out_like(o, query), lse.transpose(1, 2).contiguous().transpose(1, 2)


def cpu_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):  # fmt: skip
    if attn_mask is not None:
        return None
    return _backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale)


def flash_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    if return_debug_mask or (is_causal and query.shape[2] != key.shape[2]):
        return refuse("a debug mask" if return_debug_mask else "is_causal with other numbers of queries and keys")
    found = _forward(query, key, value, dropout_p, is_causal, scale)
    if found is None:
        return None
    o, lse = found
    return laid_out_like(o, query), lse, None, None, query.shape[2], key.shape[2], *unused(query)


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    if is_causal and query.shape[2] != key.shape[2]:
        return None
    grads = _backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale)
    return grads and _laid_out_like_each(grads, (query, key, value))


def cudnn_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):  # fmt: skip
    if attn_bias is not None or return_debug_mask:
        return refuse("attn_mask" if attn_bias is not None else "a debug mask")
    found = _forward(query, key, value, dropout_p, is_causal, scale)
    if found is None:
        return None
    o, lse = found
    # the backward reads them with dropout only
    seed, offset = (torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))
    return _in_order_of(o, query), lse[..., None], None, None, query.shape[2], key.shape[2], seed, offset, None


def cudnn_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k,
    dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    if attn_bias is not None or cum_seq_q is not None or cum_seq_k is not None:
        return None
    grads = _backward(grad_out, query, key, value, out, logsumexp.flatten(2), dropout_p, is_causal, scale)
    return grads and _laid_out_like_each(grads, (query, key, value))


def _forward(query, key, value, dropout_p, is_causal, scale) -> tuple[Tensor, Tensor] | None:
    """Returns o (B, H, T, D) and lse (B, H, T)."""
    if not _is_ours(query, key, dropout_p, is_causal):
        refuse("dropout" if dropout_p else "is_causal with more queries than keys")
        return None
    k, v = _visible(query, is_causal, key, value)
    found = route.forward(query.transpose(1, 2), k, v, CAUSAL if is_causal else FULL, scale, Options())
    return found and (found[0].transpose(1, 2), found[1])


def _backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale) -> tuple[Tensor, ...] | None:
    """Returns dq, dk, dv as (B, H, T, D)."""
    if not _is_ours(query, key, dropout_p, is_causal):
        return None
    k, v = _visible(query, is_causal, key, value)
    do, q, o = (x.transpose(1, 2) for x in (grad_out, query, out))
    grads = route.backward(do, q, k, v, o, logsumexp, CAUSAL if is_causal else FULL, scale, Options())
    if grads is None:
        return None
    hidden = key.shape[2] - k.shape[1]
    dk, dv = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, hidden)) if hidden else x for x in grads[1:])
    return tuple(x.transpose(1, 2) for x in (grads[0], dk, dv))


def _is_ours(query: Tensor, key: Tensor, dropout_p: float, is_causal: bool) -> bool:
    return dropout_p == 0.0 and not (is_causal and query.shape[2] > key.shape[2])


def _visible(query: Tensor, is_causal: bool, *pair: Tensor) -> tuple[Tensor, ...]:
    """Returns keys and values as (B, S, Hk, D), without keys that no query sees under a top-left causal mask."""
    pair = tuple(x.transpose(1, 2) for x in pair)
    return tuple(x[:, : query.shape[2]] for x in pair) if is_causal else pair


def _laid_out_like_each(grads: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(laid_out_like(x, like) for x, like in zip(grads, inputs, strict=True))


def _in_order_of(o: Tensor, query: Tensor) -> Tensor:
    """Returns o laid out as cuDNN's: like query, or in the order of its strides where the head dims differ."""
    if o.shape == query.shape:
        return laid_out_like(o, query)
    order = sorted(range(4), key=query.stride, reverse=True)
    back = [order.index(axis) for axis in range(4)]
    return o.permute(order).contiguous().permute(back)
