"""The steps of state-space models: softplus of dt and its bias, clamped; and the decay of a state over several of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# a step below 0 would let a state grow: it counts as 0, as in mamba-ssm's kernels; Mamba-1's scan bounds nothing
UNLIMITED, FREE = (0.0, math.inf), (-math.inf, math.inf)


def steps_of(dt: Tensor, bias: Tensor | None, options: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Returns the steps in a wide dtype: softplus of dt and its bias, clamped; options: softplus, low, high."""
    softplus, low, high = options
    dt = dt.to(dtype) if bias is None else dt.to(dtype) + bias.to(dtype)
    if softplus:
        # beyond this threshold log(1 + exp(x)) is x to the last bit
        dt = F.softplus(dt, threshold=40.0 if dtype == torch.float64 else 20.0)
    # softplus gives no step below 0
    free = (low, high) == FREE or (softplus and (low, high) == UNLIMITED)
    return dt if free else dt.clamp(low, high)
