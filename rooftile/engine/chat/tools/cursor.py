"""Reads a text that is still growing with plain functions: each is a generator that waits for text where it needs more.

A generator yields the parts that it finds, and None where it can decide nothing before more text comes. What it decides depends
on the text alone and never on where a piece of it ended, so parts are the same for every cut.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import TypeVar

from rooftile.engine.chat.parts import Part

T = TypeVar("T")
Reading = Generator[Part | None, None, T]
SPACES = " \t\r\n"
# a name or another short value is a mistake if it is longer
LONGEST_STRING = 4096


class Unreadable(Exception):
    """The text is no call from here on; its words are the reason."""


class Cursor:
    """The text that is not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        """Whether no more text comes."""
        self.place = 0
        """The characters of the text that are read."""
        self.taken: str | None = ""
        """The text that was read since the place that `mark` notes; None while no caller asks for it."""

    def mark(self) -> None:
        """Notes this place."""
        self.taken = ""

    def forget(self) -> None:
        """Notes no more what is read: a long text would be copied again and again."""
        self.taken = None

    def take(self, count: int) -> str:
        """Returns the next characters, and goes behind them."""
        found, self.text = self.text[:count], self.text[count:]
        self.place += len(found)
        if self.taken is not None:
            self.taken += found
        return found

    def give_back(self, text: str) -> None:
        """Goes before the text that was taken last."""
        self.text = text + self.text
        self.place -= len(text)
        if self.taken is not None:
            self.taken = self.taken[: len(self.taken) - len(text)]

    def next(self) -> Reading[str]:
        """Returns the next character without going behind it; "" at the end."""
        while not self.text and not self.ended:
            yield None
        return self.text[:1]

    def skip_spaces(self) -> Reading[None]:
        """Goes behind white space."""
        while (yield from self.next()) and self.text[0] in SPACES:
            self.take(len(self.text) - len(self.text.lstrip(SPACES)))

    def peek(self, words: Sequence[str]) -> Reading[str | None]:
        """Returns the first of some words with which the text goes on, without going behind it."""
        while not self.ended and any(len(self.text) < len(word) and word.startswith(self.text) for word in words):
            yield None
        return next((word for word in words if self.text.startswith(word)), None)

    def skip(self, *words: str) -> Reading[str | None]:
        """Goes behind one of some words if the text goes on with it, and returns it."""
        word = yield from self.peek(words)
        if word is not None:
            self.take(len(word))
        return word

    def skip_behind_spaces(self, *words: str) -> Reading[str | None]:
        """Goes behind white space and one of some words; stays where it is if none of them comes."""
        while True:
            rest = self.text.lstrip(SPACES)
            if self.ended or not any(len(rest) < len(word) and word.startswith(rest) for word in words):
                break
            yield None
        word = next((word for word in words if rest.startswith(word)), None)
        if word is not None:
            self.take(len(self.text) - len(rest) + len(word))
        return word

    def expect(self, *words: str) -> Reading[str]:
        """Goes behind one of some words.

        Raises:
            Unreadable: something else comes.
        """
        word = yield from self.skip(*words)
        if word is None:
            came = repr(self.text[:1]) if self.text else "its end"
            raise Unreadable(f"{came} stands where {' or '.join(map(repr, words))} is due")
        return word

    def until(self, *words: str, most: int = LONGEST_STRING) -> Reading[tuple[str, str]]:
        """Returns the text before the first of some words, and the word, and goes behind both.

        Raises:
            Unreadable: the text ends before, or is longer than `most`.
        """
        while True:
            found = [(place, word) for word in words if (place := self.text.find(word)) >= 0]
            # one that is not whole yet may have begun before
            place = min(found)[0] if found else len(self.text) - max(map(len, words))
            if place > most:
                raise Unreadable(f"{' or '.join(map(repr, words))} does not come within {most:,} characters")
            if found:
                before = self.take(place)
                return before, self.take(len(min(found)[1]))
            if self.ended:
                raise Unreadable(f"the text ends before {' or '.join(map(repr, words))}")
            yield None

    def string(self) -> Reading[str]:
        """Returns what a JSON string says, such as a key, and goes behind it.

        Raises:
            Unreadable: something else comes, or it is too long.
        """
        written = yield from self.written_string(LONGEST_STRING)
        try:
            found: str = json.loads(written, strict=False)
        except ValueError:
            raise Unreadable(f"{written[:40]!r} is no JSON string") from None
        return found

    def written_string(self, most: int) -> Reading[str]:
        """Returns a JSON string as it is written, and goes behind it."""
        yield from self.expect('"')
        place = 0
        while True:
            while place < len(self.text) and self.text[place] != '"':
                # an escaped quote does not end the string
                place += 2 if self.text[place] == "\\" else 1
            if place > most or (place >= len(self.text) and self.ended):
                raise Unreadable("a string has no end" if self.ended else f"a string has more than {most:,} characters")
            if place < len(self.text):
                return '"' + self.take(place + 1)
            yield None


def held_of(text: str, marks: Sequence[str]) -> int:
    """Returns how many characters at the end of a text may become one of some marks.

    Example:
        >>> held_of("Good <tool", ("<tool_call>",))
        5
    """
    most = min(len(text), max(map(len, marks), default=1) - 1)
    return next((size for size in range(most, 0, -1) if any(mark.startswith(text[-size:]) for mark in marks)), 0)
