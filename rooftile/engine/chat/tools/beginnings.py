"""Finds the beginning of a call in the text of an answer: a mark anywhere, or an opening where the answer begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

from rooftile.engine.chat.tools.cursor import SPACES

# an opening with more white space than this is none
LONGEST_OPENING = 256


class Beginnings(NamedTuple):
    """The texts that begin calls.

    Args:
        marks: each begins a call wherever it stands.
        openings: each begins a call where the answer begins, with white space anywhere in it; they are written without.
        anchors: texts behind which an opening begins a call, too.
    """

    marks: Sequence[str] = ()
    openings: Sequence[str] = ()
    anchors: Sequence[str] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Beginnings:
        """Returns what a mapping of these names has."""
        return cls(*(tuple(given.get(name, ())) for name in cls._fields))

    def last_characters(self) -> set[str]:
        """Returns the characters that complete a beginning."""
        return {text[-1] for text in (*self.marks, *self.openings)}


class Watch:
    """Looks for the beginning of a call in a text that grows.

    Args:
        beginnings: the texts that begin calls.
    """

    def __init__(self, beginnings: Beginnings) -> None:
        self._beginnings = beginnings
        self._longest = max(map(len, (*beginnings.marks, *beginnings.anchors)), default=1)
        # the end of the text, in which a mark may have begun
        self._tail = ""
        # the text since the place where an opening may stand; None if it is none
        self._opening: str | None = "" if beginnings.openings else None

    def fork(self) -> Watch:
        """Returns the same place in another text."""
        return copy(self)

    @property
    def free(self) -> int:
        """The number of next tokens that complete no beginning, but for those that are left out."""
        return 1

    @property
    def is_over(self) -> bool:
        """Whether no call can begin any more."""
        return self._opening is None and not self._beginnings.marks and not self._beginnings.anchors

    def reset(self) -> None:
        """Goes behind a call: from here on only marks begin one."""
        self._tail, self._opening = "", None

    def feed(self, text: str) -> str | None:
        """Takes the next text; returns the text from the beginning of a call on, once there is one that is complete."""
        seen = self._tail + text
        found = [place for mark in self._beginnings.marks if (place := seen.find(mark)) >= 0]
        if found:
            return seen[min(found) :]
        anchored = [place + len(each) for each in self._beginnings.anchors if (place := seen.find(each)) >= 0]
        if anchored:
            self._opening, self._tail = seen[max(anchored) :], ""
        else:
            self._tail = seen[max(0, len(seen) - self._longest + 1) :]
            self._opening = None if self._opening is None else self._opening + text
        return self._look_at_opening()

    def completions(self) -> Iterator[tuple[str, str]]:
        """Yields the beginnings that the next text may complete, each as a whole, and what of it is due."""
        for mark in self._beginnings.marks:
            for size in range(min(len(mark) - 1, len(self._tail)) + 1):
                if self._tail.endswith(mark[:size]):
                    yield mark, mark[size:]
        if self._opening is not None:
            written = _without_spaces(self._opening)
            for opening in self._beginnings.openings:
                if opening.startswith(written):
                    yield opening, opening[len(written) :]

    def _look_at_opening(self) -> str | None:
        if self._opening is None:
            return None
        written = _without_spaces(self._opening)
        if any(written.startswith(opening) for opening in self._beginnings.openings):
            return self._opening.lstrip(SPACES)
        if len(self._opening) > LONGEST_OPENING or not any(each.startswith(written) for each in self._beginnings.openings):
            self._opening = None
        return None


def _without_spaces(text: str) -> str:
    return "".join(text.split())
