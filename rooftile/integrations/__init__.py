"""Rooftile inside other libraries, without a changed line of model code."""

from __future__ import annotations


def enable() -> None:
    """Let F.scaled_dot_product_attention and Transformers (attn_implementation="rooftile") run on Rooftile."""
    raise NotImplementedError


def disable() -> None:
    """Undo `enable`."""
    raise NotImplementedError
