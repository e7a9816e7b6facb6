"""Registers attn_implementation="rooftile" once Transformers' models are imported, without importing them: that takes seconds."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import Any

_SOURCE = "transformers.modeling_utils"


def register_when_imported() -> None:
    """Registers the name now if Transformers' models are imported, else once they are. Calling it again changes nothing."""
    if hasattr(sys.modules.get(_SOURCE), "AttentionInterface"):
        _register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register() -> None:
    from rooftile.integrations import transformers

    transformers.register()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing by itself; registers the name once `transformers.modeling_utils` has been executed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _SOURCE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = execute_and_register
        return spec
