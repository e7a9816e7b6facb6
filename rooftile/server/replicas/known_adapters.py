"""`KnownAdapters`: the adapters of a replica, which an engine that is started again is given."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rooftile.engine.adapters.names import folders_of
from rooftile.engine.adapters.peft_config import room_for
from rooftile.errors import InvalidInput, Unsupported


class KnownAdapters:
    """The adapters that an engine was started with, and those that clients have loaded since.

    Args:
        settings: the keywords of `LLM`. Their room for adapters stays what it is, whatever is loaded and unloaded.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._folders: dict[str, Path] = {}
        self.lacks: frozenset[str] = frozenset()
        """Adapters that the engine was started again without, because their folders are gone."""
        self._room: dict[str, int] = {}
        # the engine says by itself what is wrong with them
        with suppress(InvalidInput, Unsupported):
            self._folders = folders_of(settings.get("adapters"))
            most, rank = settings.get("max_adapters"), settings.get("max_adapter_rank")
            if self._folders or most is not None:
                self._room["max_adapters"] = len(self._folders) if most is None else most
                self._room["max_adapter_rank"] = room_for(self._folders.values()) if rank is None else rank

    @property
    def there(self) -> list[str]:
        """The names of those that the engine has."""
        return [name for name in self._folders if name not in self.lacks]

    def note(self, name: str, path: str | None) -> None:
        """Notes an adapter that was loaded, or with None unloaded."""
        self._folders.pop(name, None)
        self.lacks -= {name}
        if path is not None:
            self._folders[name] = Path(path)

    def for_another_start(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of an engine that is started again: one whose folder is gone must not keep it from that."""
        self.lacks = frozenset(name for name, folder in self._folders.items() if not folder.is_dir())
        return {**settings, **self._room, "adapters": {name: str(self._folders[name]) for name in self.there}}
