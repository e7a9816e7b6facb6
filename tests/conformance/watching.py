"""A mode that sees which operators ran and what they launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from rooftile.runtime import launch


class Seen(NamedTuple):
    """A call of an operator as a mode saw it."""

    name: str
    arguments: tuple[Any, ...]
    results: Any
    kernels: tuple[str, ...]  # launched during the call


class Watch(TorchDispatchMode):
    """Records the calls of this package's operators, and all its launches, inside calls or not."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Seen] = []
        self.launches: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = len(self.launches)
        found = function(*args, **(kwargs or {}))
        if function.namespace == "rooftile":
            assert not kwargs
            name = function._schema.name.partition("::")[2]
            self.calls.append(Seen(name, args, found, tuple(self.launches[before:])))
        return found

    @property
    def names(self) -> set[str]:
        return {call.name for call in self.calls}

    def check_launches(self) -> None:
        """Asserts that every launch was made by exactly one of the calls, and that every call launched a kernel."""
        assert [name for call in self.calls for name in call.kernels] == self.launches
        assert self.launches
        assert [call.name for call in self.calls if not call.kernels] == []


@contextmanager
def watching() -> Iterator[Watch]:
    watch = Watch()
    with launch.observe(watch.launches.append), watch:
        yield watch
