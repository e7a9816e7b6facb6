"""`Approximation`: the object that `LLM(approximate=)` takes, unless it is given a file."""

from __future__ import annotations

from pathlib import Path

from rooftile.approximate import LokiLayers
from rooftile.errors import InvalidInput

# a method that was fitted to each layer of a model, as `rooftile calibrate` does it
Approximation = LokiLayers


def check_approximation(approximate: object) -> None:
    """Raises InvalidInput unless it is a method that was fitted to a model, or may be a file with one."""
    if not isinstance(approximate, LokiLayers | str | Path | None):
        raise InvalidInput(
            f"approximate is {repr(approximate)[:60]}; must be rooftile.approximate.LokiLayers, or a file of `rooftile calibrate`"
        )
