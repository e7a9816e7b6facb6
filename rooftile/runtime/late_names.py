"""Names that a package imports when they are first used (PEP 562): torch takes seconds, and not every program needs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def late_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a package's `__getattr__`, which imports a name or a module of the package, and keeps it.

    Args:
        package: the package's name.
        homes: the module of each name, and `module:name` where it has another name there.

    Example:
        >>> __getattr__ = late_names("rooftile.models", {"Decoder": "rooftile.models.decoder"})   # doctest: +SKIP
    """

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is not None:
            module, _, own = home.partition(":")
            found = getattr(import_module(module), own or name)
            setattr(sys.modules[package], name, found)
            return found
        # a name with underscores is asked for by tools that look for something special
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
