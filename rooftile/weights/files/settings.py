"""Reads settings by name from a checkpoint's files, and checks them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftile.errors import InvalidInput
from rooftile.runtime.dtypes import torch_dtype

if TYPE_CHECKING:
    # a tokenizer's settings are read where there is no torch
    import torch

_DUE: Any = object()
# a downloaded file may ask for more than any model has
MOST_LAYERS = 1000


def check_readable(path: Path) -> None:
    """Raises InvalidInput if a file that is there cannot be opened; packages report that as if it were missing or broken."""
    try:
        path.open("rb").close()
    except FileNotFoundError:
        raise InvalidInput(f"{path} does not exist; give the folder of a checkpoint, which has it") from None
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}; let this user read it") from None


def read_text(path: Path) -> str:
    """Reads a text file.

    Raises:
        InvalidInput: the file cannot be opened, or is not UTF-8.
    """
    check_readable(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); download it again") from None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
        InvalidInput: the file cannot be read, is not JSON, or not an object.
    """
    try:
        settings = json.loads(read_text(path))
    except RecursionError:
        raise InvalidInput(f"{path} nests its objects and lists too deep to be read; download it again") from None
    # a number of thousands of digits is a ValueError too
    except ValueError as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{path} is not JSON: {error}; download it again") from None
    if not isinstance(settings, dict):
        raise InvalidInput(f"{path} holds {type(settings).__name__}; must be a JSON object")
    return settings


class Settings:
    """The settings in a config.json, read by name."""

    def __init__(self, values: Mapping[str, Any], folder: str) -> None:
        self.values = values
        self.folder = folder

    def refused(self, what: str) -> InvalidInput:
        """Returns the error to raise about these settings."""
        return InvalidInput(f"config.json of {self.folder} {what}")

    def number(self, name: str, default: Any = _DUE) -> Any:
        """Returns a number; `default` stands in for a missing or null one."""
        value = self.values.get(name)
        if value is None:
            if default is _DUE:
                raise self.refused(f"has no {name}; it must be there, a number")
            return default
        # compared, and not converted: a whole number may be too large for a float
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self.refused(f"has {name} {str(value)[:40]!r}; must be a number")
        return value

    def size(self, name: str, default: Any = _DUE) -> Any:
        """Returns a whole number of at least 1."""
        value = self.number(name, default)
        if not isinstance(value, int) or value < 1:
            raise self.refused(f"has {name} {value!r}; must be a whole number of at least 1")
        return value

    def whole(self, name: str, default: Any = _DUE) -> Any:
        """Returns a whole number of at least 0."""
        value = self.number(name, default)
        if not isinstance(value, int) or value < 0:
            raise self.refused(f"has {name} {value!r}; must be a whole number of at least 0")
        return value

    def positive(self, name: str, default: Any = _DUE) -> Any:
        """Returns a number above 0."""
        return self._above_zero(name, self.number(name, default))

    def layers(self, name: str) -> int:
        """Returns the number of layers, which is bounded: each layer is an object, made before any memory is allocated."""
        layers: int = self.size(name)
        if layers > MOST_LAYERS:
            raise self.refused(f"has {name} {layers:,}; may be at most {MOST_LAYERS:,}")
        return layers

    def optional(self, name: str, default: float | None) -> Any:
        """Returns a number above 0; None if the setting is null, and `default` if it is missing."""
        return self._above_zero(name, self.number(name, None)) if name in self.values else default

    def _above_zero(self, name: str, value: Any) -> Any:
        if value is not None and value <= 0:
            raise self.refused(f"has {name} {value!r}; must be above 0")
        return value

    def section(self, name: str) -> dict[str, Any]:
        """Returns an object within the settings; an empty one if it is missing."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise self.refused(f"has {name} {value!r}; must be a JSON object")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """Returns a list of numbers above 0."""
        value = self.values.get(name)
        if not isinstance(value, list):
            raise self.refused(f"has {name} {repr(value)[:40]}; must be a list of numbers")
        each = Settings({f"{name}[{n}]": number for n, number in enumerate(value)}, self.folder)
        return tuple(each.positive(one) for one in each.values)

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns whether a setting is on."""
        return bool(self.values.get(name, default))

    def ids(self, name: str, default: int | None = None) -> tuple[int, ...]:
        """Returns the token ids of a setting that holds one id or a list, each once."""
        value = self.values.get(name, default)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
            raise self.refused(f"has {name} {value!r}; must be a token's id, or a list of them")
        return tuple(dict.fromkeys(ids))

    def activation(self, name: str, default: str) -> str:
        """Returns the name of the feed-forward's activation."""
        from rooftile.fused import ACTIVATIONS

        chosen = self.values.get(name) or default
        if not isinstance(chosen, str) or chosen not in ACTIVATIONS:
            raise self.refused(f"has {name} {chosen!r}; must be one of {', '.join(ACTIVATIONS)}")
        return chosen

    def dtype(self) -> torch.dtype:
        """Returns the checkpoint's dtype; float32 if none is given."""
        given = self.values.get("dtype") or self.values.get("torch_dtype") or "float32"
        try:
            return torch_dtype(given, has=("fp32", "fp16", "bf16"))
        except InvalidInput as error:
            raise self.refused(f"has a dtype that is not read: {error}") from None
