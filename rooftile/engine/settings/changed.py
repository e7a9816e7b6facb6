"""The printed form of settings: those that differ from their defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def changed(settings: Any) -> str:
    """A dataclass in the words that make it: `SamplingParams(temperature=0, max_tokens=20)`."""
    given = {field.name: getattr(settings, field.name) for field in fields(settings) if field.repr}
    defaults = {field.name: field.default for field in fields(settings)}
    return f"{type(settings).__name__}({', '.join(f'{n}={value!r}' for n, value in given.items() if value != defaults[n])})"
