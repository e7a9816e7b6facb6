"""The states of sequences: the memory that holds them (`States`), and which of them are kept for prefixes (`Snapshots`).

A layer with a state keeps one sum of a fixed size for each running answer, which no block table can share. Three kinds of rows
hold states:

    slots       one for each answer that may run, and one for the rows that pad a step
    zeros       one row, from which every sequence begins
    snapshots   states that were kept after the last token of a block, so that a prefix can begin there

To begin a sequence, to fork one and to keep a state are copies of rows, before a step or after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rooftile.kvcache.specs import State, bytes_in_words

# bytes between the reading and the writing of a copy
COPIED = 64 << 20


class StateRows:
    """The rows of states, by number.

    Args:
        answers: the most answers that run at once; answer n is in row n, and padding in the row after the last.
        kept: the most states that are kept for prefixes.
    """

    def __init__(self, answers: int, kept: int) -> None:
        self.answers, self.kept = answers, kept
        self.zeros = answers + 1
        self.first_snapshot = answers + 2
        self.total = answers + 2 + kept


class States:
    """The memory of all states.

    Args:
        specs: what the kinds of layers keep.
        rows: the rows.
        device: a device.
    """

    def __init__(self, specs: Sequence[State], rows: StateRows, device: torch.device | str = "cpu") -> None:
        self.specs, self.rows = tuple(specs), rows
        self.memory: dict[str, Tensor] = {
            # a layer's rows lie side by side, (layers, rows, ...)
            spec.name: torch.zeros(len(spec.layers), rows.total, *spec.shape, dtype=spec.dtype, device=device)
            for spec in specs
        }

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return sum(memory.nbytes for memory in self.memory.values())

    def __str__(self) -> str:
        rows, one = self.rows, self.nbytes // self.rows.total
        running, kept = bytes_in_words(one * rows.first_snapshot), bytes_in_words(one * rows.kept)
        return f"{rows.first_snapshot:,} states of {sum_of(self.specs)} for answers = {running}, and {rows.kept:,} kept = {kept}"

    def copy(self, copies: Mapping[int, int]) -> None:
        """Copies rows in all layers, each target from its source; all sources are read before any target is written."""
        if not copies:
            return
        pairs = torch.tensor([*copies.items()])
        device = next(iter(self.memory.values())).device
        if device.type == "cuda":
            pairs = pairs.pin_memory().to(device, non_blocking=True)
        for memory in self.memory.values():
            # a copy takes as many layers at a time as COPIED has room for: a launch for each layer would take longer
            count = max(COPIED // (len(copies) * memory[0, :1].nbytes), 1)
            for layers in memory.split(count):
                layers.index_copy_(1, pairs[:, 0], layers.index_select(1, pairs[:, 1]))


def sum_of(specs: Sequence[State]) -> str:
    """Says how many bytes the states of a sequence take, with the arithmetic."""
    whole = sum(spec.sequence_bytes() for spec in specs)
    return f"{bytes_in_words(whole)} ({' + '.join(map(str, specs))})"


class Snapshots:
    """Books of the states that are kept, in plain Python without a tensor.

    A state is known by the hash of all tokens before it (see `BlockPool`), so it stays true when blocks are evicted. One that a
    step writes is found from the next step on: within the step it is not there yet.

    When all places are taken, the state that was used least recently gives way. A bet, a state that may never be asked for,
    becomes a state like others when it is found. While bets have more than a quarter of the places, the oldest of them goes
    first.

    Args:
        total: the most states that are kept.

    Example:
        >>> kept = Snapshots(1)
        >>> kept.keep(b"1"), kept.find(b"1")
        (0, None)
        >>> kept.next_step(), kept.find(b"1")
        (None, 0)
        >>> kept.keep(b"1"), kept.keep(b"2"), kept.find(b"1")
        (None, 0, None)
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.reset()

    def reset(self) -> None:
        """Forgets all states."""
        self._free = list(range(self.total - 1, -1, -1))
        self._place: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._bets: OrderedDict[bytes, int] = OrderedDict()  # oldest first; none was ever found
        self._coming: dict[bytes, tuple[int, bool]] = {}  # the states that the step writes which is being planned; whether a bet

    @property
    def kept(self) -> int:
        """How many states are kept."""
        return self.total - len(self._free)

    def next_step(self) -> None:
        """Tells that the next step is being planned: what the last one has written can be found."""
        for digest, (place, bet) in self._coming.items():
            (self._bets if bet else self._place)[digest] = place
        self._coming.clear()

    def has(self, digest: bytes) -> bool:
        """Whether a state can be found."""
        return digest in self._place or digest in self._bets

    def find(self, digest: bytes) -> int | None:
        """Returns the place of a state, which counts as a use of it; None if there is none."""
        if digest in self._bets:
            self._place[digest] = self._bets.pop(digest)
        if digest not in self._place:
            return None
        self._place.move_to_end(digest)
        return self._place[digest]

    def keep(self, digest: bytes, *, bet: bool = False) -> int | None:
        """Returns the place that a state is to be written to; None if it is kept already, or all places are being written."""
        if self.has(digest) or digest in self._coming:
            return None
        if not self._free:
            crowded = 4 * len(self._bets) > self.total or not self._place
            first = self._bets if self._bets and crowded else self._place
            if not first:
                return None
            self._free.append(first.popitem(last=False)[1])
        place = self._free.pop()
        self._coming[digest] = place, bet
        return place

    def check(self) -> None:
        """Raises AssertionError, with the reason, if the bookkeeping is inconsistent."""
        coming = [place for place, _ in self._coming.values()]
        places = [*self._free, *self._place.values(), *self._bets.values(), *coming]
        assert sorted(places) == list(range(self.total)), "a place of a state is lost, or has two owners"
