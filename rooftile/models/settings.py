"""Settings out of a checkpoint's files, asked for by name and checked on the way."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rooftile.errors import InvalidInput
from rooftile.fused import ACTIVATIONS

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_DUE: Any = object()
# a file from elsewhere may ask for more than any model has
MOST_LAYERS = 1000


def read_json(path: Path) -> dict[str, Any]:
    """What a file of settings says.

    Raises:
        InvalidInput: it is not JSON, or not an object.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidInput(f"{path} is not JSON: {error}; download it again") from None
    if not isinstance(settings, dict):
        raise InvalidInput(f"{path} holds {type(settings).__name__}; must be a JSON object")
    return settings


class Settings:
    """What config.json says, asked for by name."""

    def __init__(self, values: Mapping[str, Any], folder: str) -> None:
        self.values = values
        self.folder = folder

    def refused(self, what: str) -> InvalidInput:
        """The error to raise about these settings."""
        return InvalidInput(f"config.json of {self.folder} {what}")

    def number(self, name: str, default: Any = _DUE) -> Any:
        """A number of the settings; null is as good as none if there is a default."""
        value = self.values.get(name)
        if value is None:
            if default is _DUE:
                raise self.refused(f"has no {name}; it must be there, a number")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refused(f"has {name} {value!r}; must be a number")
        return value

    def size(self, name: str, default: Any = _DUE) -> Any:
        """A whole number of the settings, at least 1."""
        value = self.number(name, default)
        if not isinstance(value, int) or value < 1:
            raise self.refused(f"has {name} {value!r}; must be a whole number of at least 1")
        return value

    def positive(self, name: str, default: Any = _DUE) -> Any:
        """A number of the settings above 0."""
        return self._above_zero(name, self.number(name, default))

    def layers(self, name: str) -> int:
        """How many layers there are: each is an object, before any memory is asked for."""
        layers: int = self.size(name)
        if layers > MOST_LAYERS:
            raise self.refused(f"has {name} {layers:,}; may be at most {MOST_LAYERS:,}")
        return layers

    def optional(self, name: str, default: float) -> Any:
        """A number above 0 that null turns off, and that has a default if nothing is said."""
        return self._above_zero(name, self.number(name, None)) if name in self.values else default

    def _above_zero(self, name: str, value: Any) -> Any:
        if value is not None and value <= 0:
            raise self.refused(f"has {name} {value!r}; must be above 0")
        return value

    def section(self, name: str) -> dict[str, Any]:
        """Settings within the settings; empty if there are none."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise self.refused(f"has {name} {value!r}; must be a JSON object")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Whether something is on."""
        return bool(self.values.get(name, default))

    def ids(self, name: str, default: int | None = None) -> tuple[int, ...]:
        """One token or several."""
        value = self.values.get(name, default)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
            raise self.refused(f"has {name} {value!r}; must be a token's id, or a list of them")
        return tuple(ids)

    def activation(self, name: str, default: str) -> str:
        """The feed-forward's function."""
        chosen = self.values.get(name) or default
        if not isinstance(chosen, str) or chosen not in ACTIVATIONS:
            raise self.refused(f"has {name} {chosen!r}; must be one of {', '.join(ACTIVATIONS)}")
        return chosen

    def dtype(self) -> torch.dtype:
        """The checkpoint's; float32 if nothing is said."""
        name = str(self.values.get("dtype") or self.values.get("torch_dtype") or "float32").removeprefix("torch.")
        if name not in _DTYPES:
            raise self.refused(f"has dtype {name!r}; must be one of {', '.join(_DTYPES)}")
        return _DTYPES[name]
