"""Does something once another package has been imported, without importing it: that may take seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def call_after_import(name: str, action: Callable[[], None]) -> None:
    """Calls `action` once, as soon as somebody has imported a module that is not imported yet.

    Args:
        name: the module.
        action: what to do when the module has been executed; what it raises is raised by the import.
    """
    sys.meta_path.insert(0, _AfterImport(name, action))  # type: ignore[arg-type]


class _AfterImport:
    """Finds a module as the other finders do, and looks at it once more when it has been executed."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Returns the module's spec as the others find it; many programs only ask whether there is one."""
        if name != self._name:
            return None
        found = (other.find_spec(name, path, target) for other in sys.meta_path if other is not self and _finds(other))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: Any) -> None:
            execute(module)
            # another import of the module, as importlib.reload does, finds it without this
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._action()

        spec.loader.exec_module = execute_and_act
        return spec


def _finds(finder: object) -> bool:
    # before Python 3.12 a finder may have no find_spec
    return hasattr(finder, "find_spec")
