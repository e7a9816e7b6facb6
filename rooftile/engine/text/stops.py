"""Finds stop strings in characters that come piece by piece.

Each is matched with its table of borders (Knuth, Morris and Pratt, 1977), so no character is looked at twice.
"""

from __future__ import annotations


class StopString:
    """A stop string, and how many of its characters those that it was shown end with.

    Args:
        text: the stop string.
        spells_special: whether it has the spelling of a special token in it; it is then shown special tokens, too.
    """

    def __init__(self, text: str, spells_special: bool) -> None:
        self.text = text
        self.spells_special = spells_special
        self.matched = 0
        # borders[n]: the length of the longest proper prefix of text[:n] that is also its suffix
        self._borders = [0, 0]
        for character in text[1:]:
            border = self._borders[-1]
            while border and text[border] != character:
                border = self._borders[border]
            self._borders.append(border + (text[border] == character))

    def find(self, piece: str, least: int) -> int | None:
        """Reads a piece of text; returns how many of its characters there are up to the stop string's end, at least `least`."""
        if not self.matched and self.text[0] not in piece:
            return None
        for i, character in enumerate(piece):
            while self.matched and self.text[self.matched] != character:
                self.matched = self._borders[self.matched]
            self.matched += self.text[self.matched] == character
            if self.matched == len(self.text):
                if i + 1 >= least:
                    return i + 1
                self.matched = self._borders[self.matched]
        return None


class Hidden:
    """The special tokens that stop strings were shown, and that are not in the text."""

    def __init__(self) -> None:
        # for each, the characters of text before it and of its spelling
        self._spelt: list[tuple[int, int]] = []

    def add(self, before: int, spelling: str) -> None:
        """Notes a special token behind `before` characters of text."""
        self._spelt.append((before, len(spelling)))

    def visible(self, stop: StopString, characters: int, end: int) -> int:
        """Returns how many of the last characters that a stop string was shown, up to a place in the text, are in the text."""
        if not stop.spells_special:
            return characters
        left, found = characters, 0
        for before, length in reversed(self._spelt):
            more = min(left, end - before)
            found, left, end = found + more, left - more, before
            if left <= length:
                return found
            left -= length
        return found + left
