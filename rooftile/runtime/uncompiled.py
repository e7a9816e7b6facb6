"""Calls that no graph of torch.compile may hold: they have collectives, and read offsets on the host.

A module of its own, imported at the first such call: the decorator imports Dynamo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

R = TypeVar("R")


@torch.compiler.disable
def uncompiled(function: Callable[..., R], arguments: tuple[Any, ...], given: Mapping[str, Any] | None = None) -> R:
    """Calls a function outside of any graph."""
    return function(*arguments, **(given or {}))
