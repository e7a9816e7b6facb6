"""Calls that no graph of torch.compile may hold: they have collectives, and read offsets on the host.

A module of its own, imported at the first such call: the decorator imports Dynamo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def uncompiled(function: Callable[..., Any], arguments: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """Calls a function outside of any graph."""
    return function(*arguments, **given)
