"""Attention as modules."""

from rooftile.nn.attention import Attention

__all__ = ["Attention"]
