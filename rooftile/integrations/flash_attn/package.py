"""`import flash_attn` for other libraries: a package of that name whose modules are Rooftile's.

    flash_attn, flash_attn.flash_attn_interface    rooftile.integrations.flash_attn
    flash_attn.bert_padding                        rooftile.integrations.flash_attn_padding
    flash_attn.layers.rotary                       rooftile.integrations.flash_attn_rotary
    flash_attn.cute                                rooftile.integrations.flash_attn_4
    flash_attn_interface                           rooftile.integrations.flash_attn_3

One finder in `sys.meta_path` answers imports of these names, and says that a distribution "flash-attn" is installed, which
Transformers asks for before it runs attn_implementation="flash_attention_2".
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from rooftile.errors import Unsupported

# the version whose functions and argument order these are
VERSION = "2.8.3"
_ROOM = "rooftile.integrations"
# the modules that are found, and where their names come from; None: a package without any
_MODULES = {
    "flash_attn": f"{_ROOM}.flash_attn",
    "flash_attn.bert_padding": f"{_ROOM}.flash_attn_padding",
    "flash_attn.cute": f"{_ROOM}.flash_attn_4",
    "flash_attn.flash_attn_interface": f"{_ROOM}.flash_attn",
    "flash_attn.layers": None,
    "flash_attn.layers.rotary": f"{_ROOM}.flash_attn_rotary",
    "flash_attn_interface": f"{_ROOM}.flash_attn_3",
}
_TRANSFORMERS = "transformers.utils.import_utils"


def install() -> None:
    """Lets `import flash_attn` of other libraries find Rooftile. Calling it again changes nothing.

    Raises:
        Unsupported: the flash-attn package itself has been imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "flash_attn" in sys.modules:
        raise Unsupported("flash_attn has been imported already; call install() before the first import of it")
    sys.meta_path.insert(0, _Finder())
    _tell_transformers()


def uninstall() -> None:
    """Undoes `install`; harmless without one. What was imported from `flash_attn` goes on working."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, _Finder)]
    if not finders:
        return
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in finders]
    for name in _MODULES:
        sys.modules.pop(name, None)
    _tell_transformers()


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in _MODULES:
            is_package = any(other.startswith(f"{name}.") for other in _MODULES)
            return ModuleSpec(name, self, origin=__name__, is_package=is_package)
        if name.startswith("flash_attn."):
            has = ", ".join(_MODULES)
            raise ModuleNotFoundError(f"{name} is not in the flash_attn that Rooftile installed; it has {has}", name=name)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        source = _MODULES[module.__name__]
        module.__version__ = VERSION  # type: ignore[attr-defined]
        if source is None:
            return
        found = importlib.import_module(source)
        module.__doc__, module.__all__ = found.__doc__, list(found.__all__)  # type: ignore[attr-defined]
        vars(module).update({name: getattr(found, name) for name in found.__all__})

    def find_distributions(self, context: Any = None) -> Iterator[metadata.Distribution]:
        """Answers `importlib.metadata`: one distribution, flash-attn."""
        if context is None or context.name is None or context.name.replace("_", "-").lower() == "flash-attn":
            yield _Distribution()


class _Distribution(metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        known = {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
            "top_level.txt": "flash_attn\n",
        }
        return known.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path

    @property
    def files(self) -> Sequence[Any] | None:  # type: ignore[override]
        return None


def _tell_transformers() -> None:
    """Transformers asks once which packages are installed, and keeps the answer."""
    transformers = sys.modules.get(_TRANSFORMERS)
    if transformers is None:
        return
    mapping = getattr(transformers, "PACKAGE_DISTRIBUTION_MAPPING", None)
    if mapping is not None:
        mapping.pop("flash_attn", None)
        mapping |= {name: found for name, found in metadata.packages_distributions().items() if name == "flash_attn"}
    for ask in vars(transformers).copy().values():
        if getattr(ask, "__name__", "").startswith("is_flash_attn") and hasattr(ask, "cache_clear"):
            ask.cache_clear()
