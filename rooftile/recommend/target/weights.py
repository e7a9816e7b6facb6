"""From scores to weights and back, for plain operations: softmax over the events, or a function of each score.

A score of -inf hides an event: its weight is 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def softmax(x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of scores (..., S), and their lse (...): 0 and -inf where nothing is seen."""
    if not x.shape[-1]:
        return x, x.new_full(x.shape[:-1], -math.inf)
    x = torch.where(seen, x, -math.inf)
    top = x.amax(-1, keepdim=True)
    p = torch.exp(x - torch.where(top == -math.inf, 0.0, top))
    total = p.sum(-1, keepdim=True)
    return p / torch.where(total == 0, 1.0, total), (top + total.log())[..., 0]


def again(x: Tensor, seen: Tensor, lse: Tensor) -> Tensor:
    """The softmax's weights from the scores and their lse (...)."""
    lse = torch.where(lse == -math.inf, 0.0, lse)[..., None]
    return torch.exp(torch.where(seen, x, -math.inf) - lse)


def pointwise(x: Tensor, seen: Tensor, weights: str) -> Tensor:
    """The weights of scores without a softmax."""
    seen = seen & (x != -math.inf)
    x = torch.where(seen, x, 0.0)
    gate = x.sigmoid()
    return torch.where(seen, gate if weights == "sigmoid" else x * gate, 0.0)


def slope(x: Tensor, seen: Tensor, weights: str) -> Tensor:
    """The derivative of `pointwise`."""
    seen = seen & (x != -math.inf)
    x = torch.where(seen, x, 0.0)
    gate = x.sigmoid()
    found = gate * (1 - gate) if weights == "sigmoid" else gate * (1 + x * (1 - gate))
    return torch.where(seen, found, 0.0)
