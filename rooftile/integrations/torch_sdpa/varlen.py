"""The operators under SDPA's, which torch.nn.attention.varlen calls: (B, T, H, D), or (total, H, D) with offsets.

Causal masks and windows are aligned bottom-right here.
"""

from __future__ import annotations

from rooftile.exact.masks import CAUSAL, FULL, Mask, Window
from rooftile.exact.spec import Options
from rooftile.integrations.torch_sdpa import route
from rooftile.integrations.torch_sdpa.route import laid_out_like, refuse, unused


def _window(is_causal: bool, left: int | None, right: int | None) -> Mask:
    """-1 and None leave a side open."""
    left, right = (None if side is None or side < 0 else int(side) for side in (left, right))
    return Window(left, right) & (CAUSAL if is_causal else FULL)


def forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
    **newer,
):  # fmt: skip
    untranslated = (seqused_k, alibi_slopes, block_table, *newer.values())
    if dropout_p or return_debug_mask or any(x is not None for x in untranslated):
        return refuse("varlen attention with dropout, a debug mask, ALiBi, paged keys or an argument of a newer PyTorch")
    if (cum_seq_q is None) != (cum_seq_k is None):
        return refuse("varlen attention with offsets of queries or of keys alone")
    mask = _window(is_causal, window_size_left, window_size_right)
    found = route.forward(query, key, value, mask, scale, Options(cu_q=cum_seq_q, cu_k=cum_seq_k))
    if found is None:
        return None
    return laid_out_like(found[0], query), found[1], *unused(query)


def forward_inplace(out, *args, **kwargs):
    found = forward(*args, **kwargs)
    if found is None:
        return None
    out.copy_(found[0])
    return found[1]


def backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None, **newer,
):  # fmt: skip
    if dropout_p or any(x is not None for x in newer.values()) or (cum_seq_q is None) != (cum_seq_k is None):
        return None
    mask = _window(is_causal, window_size_left, window_size_right)
    options = Options(cu_q=cum_seq_q, cu_k=cum_seq_k)
    grads = route.backward(grad_out, query, key, value, out, logsumexp, mask, scale, options)
    if grads is None:
        return None
    return tuple(laid_out_like(x, like) for x, like in zip(grads, (query, key, value), strict=True))
