"""`CallReader`: content up to a mark, and the calls behind it, which each syntax reads in its own way."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence

from rooftile.engine.chat.parts import CallArguments, CallBroken, CallEnd, CallStart, Content, Part
from rooftile.engine.chat.tools.cursor import SPACES, Cursor, Reading, Unreadable, held_of
from rooftile.engine.chat.tools.tool import NAME, Tool

PIECE = 2048


class CallReader:
    """Reads one answer; a syntax is a class with its marks and `calls`.

    White space beside a call is left out, since templates write their own there. What stands behind a mark and is no call is
    content, as it was written, up to the point at which a call has begun: from there on it is a broken call.

    Args:
        tools: the functions that the model may call.
    """

    MARKS: tuple[str, ...] = ()
    """The marks that begin calls."""
    ENDS: tuple[str, ...] = ()
    """The marks that end calls; the reader leaves out the rest of a broken call up to the next mark."""
    INSIDE: tuple[str, ...] = ()
    """Marks within calls."""
    SPECIAL: frozenset[str] = frozenset()
    """Marks that are special tokens in the models that write them: never content."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.cursor = Cursor()
        self._steps = self._read()
        self._count = 0
        self._open = False
        # white space that is content if text follows
        self._spaces = ""
        self._silent_since_call = False

    @classmethod
    def marks(cls) -> tuple[str, ...]:
        """Returns all marks, which the text of an answer must have."""
        return (*cls.MARKS, *cls.INSIDE, *cls.ENDS)

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that the next text completes."""
        # in pieces: each part that is taken copies the rest
        parts = []
        for start in range(0, len(text), PIECE):
            self.cursor.text += text[start : start + PIECE]
            parts += self._advance()
        return parts

    def finish(self) -> list[Part]:
        """Returns the last parts; the text ends here."""
        self.cursor.ended = True
        return self._advance()

    def calls(self, mark: str) -> Reading[None]:
        """Reads the calls behind a mark, one or more.

        Raises:
            Unreadable: it is no call, or one that is broken.
        """
        raise NotImplementedError

    def begin_without_mark(self) -> Reading[bool]:
        """Tells whether the answer begins with a call that no mark announces."""
        yield from ()
        return False

    def start(self, name: str, known: Collection[str] | None = None) -> CallStart:
        """Begins a call.

        Raises:
            Unreadable: this is no name of a function, or none of those that are known.
        """
        if NAME.fullmatch(name) is None or (known is not None and name not in known):
            raise Unreadable(f"{name[:40]!r} is no function's name")
        self._open, self._spaces, self._silent_since_call = True, "", True
        self._count += 1
        self.cursor.forget()
        return CallStart(self._count - 1, name)

    def arguments(self, text: str) -> CallArguments:
        """Adds to the arguments of the call that has begun."""
        return CallArguments(self._count - 1, text)

    def end(self) -> CallEnd:
        """Ends the call."""
        self._open = False
        self.cursor.mark()
        return CallEnd(self._count - 1)

    def _advance(self) -> list[Part]:
        parts = []
        for part in self._steps:
            if part is None:
                break
            parts.append(part)
        return parts

    def _read(self) -> Reading[None]:
        yield from self.cursor.skip_spaces()
        self._spaces = self.cursor.taken or ""
        self.cursor.mark()
        if (yield from self.begin_without_mark()):
            yield from self._try("")
        while (mark := (yield from self._content())) is not None:
            self.cursor.mark()
            yield from self._try(mark)
        if self._spaces and not self._silent_since_call:
            yield Content(self._spaces)

    def _try(self, mark: str) -> Reading[None]:
        try:
            yield from self.calls(mark)
        except Unreadable as error:
            if self._open:
                self._open = False
                yield CallBroken(self._count - 1, str(error))
                yield from self._skip_rest()
            else:
                yield from self._say(("" if mark in self.SPECIAL else mark) + (self.cursor.taken or ""))

    def _skip_rest(self) -> Reading[None]:
        """Goes behind what is left of a broken call: up to its end, or to the next one."""
        cursor, marks = self.cursor, self.MARKS + self.ENDS
        while True:
            found = [(place, mark) for mark in marks if (place := cursor.text.find(mark)) >= 0]
            if found:
                place, mark = min(found)
                cursor.take(place + (len(mark) if mark in self.ENDS else 0))
                return
            cursor.take(len(cursor.text) - held_of(cursor.text, marks))
            if cursor.ended:
                cursor.take(len(cursor.text))
                return
            yield None

    def _content(self) -> Reading[str | None]:
        """Reads content; returns the mark that ends it, or None at the end."""
        cursor = self.cursor
        while True:
            cursor.forget()
            found = [(place, mark) for mark in self.MARKS if (place := cursor.text.find(mark)) >= 0]
            if found:
                place, mark = min(found)
                yield from self._say(cursor.take(place))
                return cursor.take(len(mark))
            held = 0 if cursor.ended else held_of(cursor.text, self.MARKS)
            yield from self._say(cursor.take(len(cursor.text) - held))
            if cursor.ended:
                return None
            yield None

    def _say(self, text: str) -> Iterator[Part]:
        text = self._spaces + text
        said = text.rstrip(SPACES)
        self._spaces = text[len(said) :]
        if said:
            self._silent_since_call = False
            yield Content(said)


def object_of(text: str) -> str:
    """Returns a text that is a JSON object.

    Raises:
        Unreadable: it is none.
    """
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"its arguments are no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Unreadable(f"its arguments are {text[:40]!r}; must be an object")
    return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
