"""The checks of arguments that several rooms share: from what a caller gives to flags, words and numbers, or one sentence.

Importing this module does not import torch.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from dataclasses import fields
from typing import Any

from rooftile.errors import InvalidInput


def shown(value: object) -> str:
    """Returns a value as a message shows it: tensors and long things by what they are."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def whole(value: Any) -> int | None:
    """Returns an integer of Python, numpy or a tensor of one as an int; None for anything else, booleans too."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", None)) in ("bool", "torch.bool"):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        return None


def python_number(value: Any) -> Any:
    """Returns a number of numpy as Python's, and anything else as it is.

    Example:
        >>> python_number(0.5), python_number("a")
        (0.5, 'a')
    """
    if value is None or type(value) in (int, float, bool, str) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def as_python_numbers(record: Any) -> None:
    """Makes numbers of numpy in the fields of a dataclass Python's; it may be frozen."""
    for each in fields(record):
        value = getattr(record, each.name)
        if (number := python_number(value)) is not value:
            object.__setattr__(record, each.name, number)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of the given names."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidInput(f"{name} is {shown(value)}; must be {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} is {shown(value)}; must be True or False")
    return value


def check_backend(value: Any, choices: tuple[str, ...]) -> str:
    """The name of a way to compute a method; None and "auto" take the fastest that runs."""
    return "auto" if value is None else check_choice("backend", value, ("auto", *choices))


def check_deterministic(value: Any) -> None:
    """Raises InvalidInput unless this is True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise InvalidInput(f"deterministic is {shown(value)}; must be True, False, or None to follow torch")


def check_count(name: str, value: Any, least: int = 1) -> int:
    """A whole number, of Python or numpy."""
    number = whole(value)
    if number is None or number < least:
        raise InvalidInput(f"{name} is {shown(value)}; must be an int of at least {least}")
    return number


def check_number(name: str, value: Any) -> float:
    """A finite number, of Python or numpy."""
    # compared, for torch.compile makes a symbol of a number that changes from call to call, and math.isfinite takes none
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)) or not -math.inf < float(value) < math.inf:
        raise InvalidInput(f"{name} is {shown(value)}; must be a finite number")
    return float(value)
