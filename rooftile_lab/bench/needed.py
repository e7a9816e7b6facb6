"""Packages that only some benchmarks need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rooftile.errors import Unsupported


def needed(suite: str, package: str) -> Any:
    """Imports a package for `rooftile bench SUITE`; raises Unsupported if it is not installed."""
    try:
        return import_module(package)
    except ImportError:
        raise Unsupported(f"`rooftile bench {suite}` needs the package {package}; pip install {package}") from None
