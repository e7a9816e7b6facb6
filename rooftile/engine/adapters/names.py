"""The adapters that settings name: a dictionary {name: folder}, or words name=folder as flags give them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rooftile.errors import InvalidInput, Unsupported

# bounds the names that lists and logs show
LONGEST_NAME = 128


class AdapterChange(NamedTuple):
    """The order to load an adapter from a folder, or with None to unload it."""

    id: int
    name: str
    path: str | None


def check_name(name: object) -> None:
    """Raises InvalidInput for a name that no adapter may have."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise InvalidInput(
            f"the adapter's name is {repr(name)[:LONGEST_NAME]}; must be 1 to {LONGEST_NAME} characters that can be printed"
        )


def adapters_of(given: Any) -> dict[str, Path]:
    """Returns the folders of adapters by name.

    Raises:
        InvalidInput: they are neither a dictionary nor words name=folder, two have one name, or a folder is none.
    """
    found: dict[str, Path] = {}
    for name, path in _pairs(given):
        check_name(name)
        if name in found:
            raise InvalidInput(f"adapters has {name!r} twice; give each a name of its own")
        if not isinstance(path, str | Path) or not Path(path).is_dir():
            raise InvalidInput(f"adapters has {str(path)[:200]!r} for {name!r}, which is no folder; give one that peft has saved")
        found[name] = Path(path)
    return found


def folders_of(given: Any) -> dict[str, Path]:
    """Returns the folders of adapters by name, of which some may be there no more.

    Raises:
        InvalidInput: they are neither a dictionary nor words name=folder.
    """
    return {name: Path(path) for name, path in _pairs(given)}


def _pairs(given: Any) -> list[tuple[Any, Any]]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        return list(given.items())
    if not isinstance(given, list | tuple) or not all(isinstance(word, str) and word.partition("=")[2] for word in given):
        raise InvalidInput(f"adapters is {repr(given)[:80]}; must be a dictionary {{name: folder}}, or words name=folder")
    return [(word.partition("=")[0], word.partition("=")[2]) for word in given]


def check_adapter_settings(given: Mapping[str, Any]) -> None:
    """Refuses settings that do not go with adapters, or with their number.

    Raises:
        InvalidInput: there are more adapters than there is room for, or a rank and no adapters.
        Unsupported: a setting has no adapters with it.
    """
    count, most = len(adapters_of(given.get("adapters"))), given.get("max_adapters")
    if most is not None and count > most:
        raise InvalidInput(f"{count} adapters are given, and max_adapters is {most}: make it larger")
    if not count and most is None:
        if given.get("max_adapter_rank") is not None:
            raise InvalidInput("max_adapter_rank is given and no adapters; give them, or max_adapters for later ones")
        return
    if given.get("deterministic"):
        raise Unsupported("adapters are asked for, and deterministic is True; has no adapters with it: leave one out")
    if given.get("task") == "embed":
        raise Unsupported('adapters are asked for, and task is "embed"; vectors are made without adapters: leave one out')
