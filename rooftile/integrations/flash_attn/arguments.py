"""flash-attn's arguments in the words of `rooftile.attention`."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.exact.masks import CAUSAL, FULL, Mask, Window
from rooftile.runtime.arguments import shown

# out, softmax_lse, and the weights of a dense call with dropout
WithLse = tuple[Tensor, Tensor, Tensor | None]
Output = Tensor | WithLse


def mask_of(causal: bool, window_size: tuple[int, int]) -> Mask:
    """Returns the mask that causal and window_size describe; any pair of numbers or None is taken, a tensor's too."""
    sides = window_size.tolist() if isinstance(window_size, (Tensor, np.ndarray)) else window_size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise InvalidInput(f"window_size is {shown(window_size)}; must be a pair (left, right), -1 for no bound")
    # any negative number leaves a side open, as in flash-attn
    left, right = (None if side is None or side < 0 else side for side in sides)
    return Window(left, right) & (CAUSAL if causal else FULL)


def options_of(
    dropout_p: float, softmax_scale: float | None, softcap: float, alibi_slopes: Tensor | None, deterministic: bool
) -> dict[str, Any]:
    """Returns the same options as keywords of `rooftile.attention`."""
    return {
        "alibi": alibi_slopes,
        "deterministic": deterministic or None,
        "dropout": dropout_p,
        "scale": softmax_scale,
        # in flash-attn, values up to 0 mean none
        "softcap": softcap if softcap > 0 else None,
    }


def unpacked(name: str, x: Tensor, parts: int, axes: str) -> tuple[Tensor, ...]:
    """Returns views of the `parts` tensors that x holds along its last axis but two; `axes` names all of them."""
    ndim = axes.count(",") + 1
    if not isinstance(x, Tensor) or x.ndim != ndim or x.shape[-3] != parts:
        raise InvalidInput(f"{name} is {shown(x)}; must be a tensor {axes}")
    return x.unbind(-3)
