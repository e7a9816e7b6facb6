"""The calls of a dense call with targets: slices of its tensors, which copy nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.exact.masks import FULL, Mask
from rooftile.exact.reference.philox import keep_mask
from rooftile.exact.spec import Call, Options, replaced


class Targets(NamedTuple):
    """The call of the targets over the history, and what their pairs with themselves need."""

    call: Call
    k: Tensor  # (B, n, Hk, D)
    v: Tensor  # (B, n, Hk, Dv)
    bias: Tensor | None  # (1|B, 1|H, 1|n)
    kept: Tensor | None  # (B, H, n): what dropout keeps

    # how much too small an lse of the call is
    excess: None = None

    @staticmethod
    def joined(history: tuple[Tensor, Tensor] | None, targets: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns o and lse of all rows."""
        if history is None:
            return targets
        return torch.cat([history[0], targets[0]], dim=1), torch.cat([history[1], targets[1]], dim=2)


def cut(call: Call, mask: Mask) -> tuple[Call | None, Targets]:
    """Returns the call of the history, None if every query is a target, and the targets."""
    n, T, S = mask.targets, call.q.shape[1], call.k.shape[1]
    end = S - n
    q_history, q_own = call.q.split([T - n, n], dim=1)
    k_history, k_own = call.k.split([end, n], dim=1)
    v_history, v_own = call.v.split([end, n], dim=1)
    # every target sees the history from this key on
    first = max(mask.over_history.first_key(end), 0)
    bias_history, bias_targets, bias_own = _cut_bias(call.options.bias, T - n, end, first)
    history = call._replace(
        q=q_history, k=k_history, v=v_history, mask=mask.over_history, options=replaced(call.options, bias=bias_history)
    )  # fmt: skip
    # a target's distance from key j is end - j, in every row
    alibi = _as_bias(call, torch.arange(end - first, 0, -1, device=call.q.device))
    bias_targets = alibi if bias_targets is None else bias_targets if alibi is None else bias_targets + alibi
    seed, kept = _draws(call, n, T, end, first)
    targets = call._replace(
        q=q_own, k=k_history[:, first:], v=v_history[:, first:], mask=FULL, options=Options(bias=bias_targets, seed=seed),
        settings=call.settings._replace(needs_lse=True),
    )  # fmt: skip
    return history if n < T else None, Targets(targets, k_own, v_own, bias_own, kept)


def _cut_bias(bias: Tensor | None, rows: int, end: int, first: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The bias (1|B, 1|H, 1|T, 1|S) of the history, of targets over the history from key `first`, and of their own pairs."""
    if bias is None:
        return None, None, None
    above, below = _cut(bias, 2, rows)
    history, _ = _cut(above, 3, end)
    targets, own = _cut(below, 3, end)
    own = own.diagonal(dim1=2, dim2=3) if own.shape[2] > 1 and own.shape[3] > 1 else own.flatten(2)
    return history, targets[..., first:] if bias.shape[3] > 1 else targets, own


def _cut(bias: Tensor, axis: int, at: int) -> tuple[Tensor, Tensor]:
    """The parts before and from place `at` of an axis; each is the whole where it is broadcast."""
    if bias.shape[axis] == 1:
        return bias, bias
    before, after = bias.split([at, bias.shape[axis] - at], dim=axis)
    return before, after


def _as_bias(call: Call, distance: Tensor) -> Tensor | None:
    """The slopes times distances (keys,), as (1|B, H, 1, keys)."""
    slopes = call.options.alibi
    if slopes is None:
        return None
    wide = torch.promote_types(call.q.dtype, torch.float32)
    return -slopes.to(wide).reshape(-1, call.q.shape[2], 1, 1) * distance


def _draws(call: Call, n: int, T: int, end: int, first: int) -> tuple[Tensor | None, Tensor | None]:
    """The seed of the targets' call, whose draws are at their places in the whole, and what dropout keeps of their own pairs."""
    seed, device = call.options.seed, call.q.device
    if seed is None:
        return None, None
    b, h, c = (torch.arange(size, device=device) for size in (call.q.shape[0], call.q.shape[2], n))
    kept = keep_mask(seed, call.settings.dropout, b[:, None, None], h[:, None], c + (T - n), c + end)
    places = torch.stack([b, torch.zeros_like(b), torch.full_like(b, T - n), torch.full_like(b, first)], dim=1)
    return torch.cat([seed, places.flatten()]), kept
