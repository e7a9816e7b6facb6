"""The masks of a model's layers."""

from __future__ import annotations

from rooftile.exact.masks import CAUSAL, Mask, Window
from rooftile.models import ModelConfig


def masks_of(config: ModelConfig) -> tuple[Mask, ...]:
    """Returns the mask of each layer."""
    return tuple(CAUSAL if w is None else CAUSAL & Window(w - 1) for w in config.windows)
