"""`Adapters`: the adapters of an engine by name, and the slot of each."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rooftile.engine.adapters.names import LONGEST_NAME, check_name
from rooftile.errors import InvalidInput


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter in a slot.

    Args:
        name: what requests call it.
        path: its folder.
        slot: its place in memory.
        salt: no other adapter has it, so prefixes of one are not found by another, nor by one of this name that comes later.
    """

    name: str
    path: Path
    slot: int
    salt: str


class Adapters:
    """The adapters of an engine.

    Args:
        slots: how many there are at once.
        read: reads a folder into a slot on all ranks, or refuses it and leaves the slot empty; returns the folder.
    """

    def __init__(self, slots: int, read: Callable[[int, str | Path], Path]) -> None:
        self.slots, self._read = slots, read
        self._by_name: dict[str, LoadedAdapter] = {}
        # an unloaded adapter keeps its slot until its last request has ended
        self._leaving: list[LoadedAdapter] = []

    @property
    def names(self) -> list[str]:
        """The names that requests may give."""
        return list(self._by_name)

    @property
    def paths(self) -> Mapping[str, Path]:
        """The folders by name."""
        return {name: each.path for name, each in self._by_name.items()}

    def load(self, name: str, path: str | Path, used: Collection[LoadedAdapter] = ()) -> None:
        """Reads an adapter into a free slot; nothing changes if it is refused.

        Args:
            name: what requests call it.
            path: its folder.
            used: the adapters of the requests that run or wait.

        Raises:
            InvalidInput: the name is taken or none, no slot is free, or the folder's adapter does not fit.
            Unsupported: the adapter has what is not computed.
        """
        check_name(name)
        if name in self._by_name:
            raise InvalidInput(f"an adapter {name!r} is loaded already; unload it first, or give another name")
        self._leaving = [each for each in self._leaving if each in used]
        taken = {each.slot for each in (*self._by_name.values(), *self._leaving)}
        if len(taken) == self.slots:
            leaving = len(self._leaving)
            more = f", {leaving} of them by adapters that were unloaded and still answer requests" if leaving else ""
            raise InvalidInput(f"all {self.slots} slots for adapters are taken{more}: unload one, or make max_adapters larger")
        slot = next(slot for slot in range(self.slots) if slot not in taken)
        self._by_name[name] = LoadedAdapter(name, self._read(slot, path), slot, secrets.token_hex(16))

    def unload(self, name: str) -> None:
        """Takes no more requests for an adapter. Those that run or wait end with it, and then its slot is free.

        Raises:
            InvalidInput: there is no such adapter.
        """
        self._leaving.append(self.find(name))
        del self._by_name[name]

    def find(self, name: str) -> LoadedAdapter:
        """Returns an adapter.

        Raises:
            InvalidInput: there is none of this name.
        """
        found = self._by_name.get(name) if isinstance(name, str) else None
        if found is None:
            raise InvalidInput(f"the adapter is {repr(name)[:LONGEST_NAME]}; has {_listed(self._by_name)}")
        return found


def _listed(names: Iterable[str]) -> str:
    several = [repr(name) for name in names]
    more = f" and {len(several) - 8} more" if len(several) > 8 else ""
    return (", ".join(several[:8]) + more) or "no adapter"
