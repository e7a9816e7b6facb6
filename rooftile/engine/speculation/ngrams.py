"""`NgramIndex`: where the last tokens of a sequence occurred before, and what followed there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Guesser(Protocol):
    """Guesses how one sequence goes on."""

    def __init__(self, shortest: int, longest: int) -> None: ...

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        """Returns at most `count` tokens that may follow `ids`: the sequence of the last call, and more."""


class NgramIndex:
    """The n-grams of one sequence, each with the place behind its latest occurrence.

    It reads a token once, in constant time, and holds `longest - shortest + 1` entries for each.

    Args:
        shortest, longest: the lengths of the n-grams.

    Example:
        >>> index = NgramIndex(1, 3)
        >>> index.guess([7, 1, 2, 3, 9, 1, 2], 3)
        [3, 9, 1]
        >>> index.guess([7, 1, 2, 3, 9, 1, 2, 8, 8], 3)         # a text that repeats itself goes on doing so
        [8, 8, 8]
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._places: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in self._sizes}
        self._read = 0

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        """Returns the tokens that followed the latest occurrence of the longest n-gram that `ids` ends with; [] if none did.

        Args:
            ids: the sequence: the one of the last call, and more.
            count: how many tokens to return.
        """
        self._add(ids)
        for size in self._sizes:
            place = self._places[size].get(tuple(ids[-size:]))
            if place is not None:
                found = list(ids[place : place + count])
                # behind the end of the sequence the guess itself goes on
                for n in range(len(found), count):
                    found.append(found[n - (len(ids) - place)])
                return found
        return []

    def _add(self, ids: Sequence[int]) -> None:
        """Enters the n-grams that have got a token behind them."""
        end = len(ids)
        for size in self._sizes:
            # an n-gram that ends with the last token has nothing behind it yet; it is entered next time
            first = max(self._read, size)
            if first < end:
                part = ids[first - size : end - 1]
                self._places[size].update(
                    zip(zip(*(part[n:] for n in range(size)), strict=False), range(first, end), strict=False)
                )
        self._read = max(self._read, end)
