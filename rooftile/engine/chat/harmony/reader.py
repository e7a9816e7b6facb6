"""`HarmonyReader`: reads the messages of one answer as thoughts, calls and content.

    between --a mark, or "to="--> header --<|message|>--> text --a mark that ends, or begins--> between

The channel analysis has thoughts, a message to a function is a call, and all else is content: the channel final, and what a model
says in commentary before it calls. Two messages of one kind are two paragraphs. A text outside of any message is content, as
it is written; marks never are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rooftile.engine.chat.harmony.header import (
    ANALYSIS,
    CONSTRAIN,
    ENDS,
    MARKS,
    MESSAGE,
    OPENING,
    START,
    Header,
    without_marks,
)
from rooftile.engine.chat.parts import CallBroken, Content, Part, Thought
from rooftile.engine.chat.tools.cursor import Reading, Unreadable, held_of
from rooftile.engine.chat.tools.json_calls import read_arguments
from rooftile.engine.chat.tools.reader import CallReader
from rooftile.engine.chat.tools.tool import Tool

RECIPIENT = "to="
PARAGRAPH = "\n\n"
# a header without an end is none
LONGEST_HEADER = 1024


class HarmonyReader(CallReader):
    """Reads one answer.

    Args:
        tools: the functions that the model may call; None if messages to functions are content.
        turn: the text of the prompt's last turn (see `last_turn`).
        thinks: whether the channel analysis has thoughts; it is content otherwise.
    """

    MARKS = MARKS

    def __init__(self, tools: Sequence[Tool] | None, turn: str = OPENING, *, thinks: bool = True) -> None:
        super().__init__(tools or ())
        self.thinking = False
        """Whether the text so far ends inside of a thought."""
        self.header: Header | None = None
        """The header of the message whose text is being read; None between messages, and in a header."""
        self.spans: list[tuple[int, int]] = []
        """The places of thoughts in the text, in characters, marks left out."""
        self._calls_are_read, self._thinks = tools is not None, thinks
        self._turn = turn
        # the kinds of parts that have come, so that the next message of the kind is another paragraph
        self._said: set[type[Part]] = set()

    def _read(self) -> Reading[None]:
        head, opened, text = self._turn.partition(MESSAGE)
        beginning = head.strip() == OPENING
        if any(mark in text for mark in ENDS):
            head = opened = ""
        head = "" if beginning and not opened else START + head
        while True:
            if not opened:
                whole = yield from self._header(head, beginning=beginning)
                if whole is None:
                    return
                head = whole
            yield from self._message(Header.of(head))
            head, opened, beginning = "", "", False

    def _header(self, head: str, *, beginning: bool) -> Reading[str | None]:
        """Goes behind the next header.

        Args:
            head: the part of it that is read.
            beginning: whether the role stands before the text, so that a recipient may follow.

        Returns:
            The header, or None if the text ends before.
        """
        cursor = self.cursor
        while True:
            if not head:
                head = yield from self._between((*MARKS, RECIPIENT) if beginning else MARKS)
                beginning = False
                if not head and cursor.ended and not cursor.text:
                    return None
                continue
            try:
                text, mark = yield from cursor.until(*MARKS, most=LONGEST_HEADER)
            except Unreadable:
                if cursor.ended and len(cursor.text) <= LONGEST_HEADER:
                    yield from self._break_off(head)
                    return None
                yield from self._text(Content, first=without_marks(head))
                head = ""
                continue
            head += text
            if mark == MESSAGE:
                return head
            # a message that ends before its text says nothing; one that begins takes the place of the one before
            head = "" if mark in ENDS else mark if mark == START else head + mark

    def _between(self, words: Sequence[str]) -> Reading[str]:
        """Reads what stands between two messages; returns what begins a header, if one begins here."""
        cursor = self.cursor
        cursor.mark()
        yield from cursor.skip_spaces()
        word = yield from cursor.skip(*words)
        spaces = cursor.taken or ""
        cursor.forget()
        if word is None:
            if cursor.text:
                yield from self._text(Content, first=spaces)
            return ""
        if word == MESSAGE:
            cursor.give_back(word)
            return START
        return "" if word in ENDS else START + word if word == RECIPIENT else word

    def _break_off(self, head: str) -> Reading[None]:
        """Ends in a header: tells of a call whose function is known, and leaves the rest out."""
        cursor = self.cursor
        header = Header.of(head + cursor.text)
        name = header.function(self.tools)
        cursor.take(len(cursor.text))
        if self._calls_are_read and name is not None and header.ended:
            yield self.start(name)
            yield self._broken("the text ends before its arguments")

    def _message(self, header: Header) -> Reading[None]:
        name = header.function(self.tools) if self._calls_are_read else None
        self.header = header
        if name is not None:
            yield from self._call(name)
        elif header.channel == ANALYSIS and self._thinks:
            place = self.cursor.place
            self.thinking = True
            self.spans.append((place, place))
            yield from self._text(Thought)
            self.thinking = False
        else:
            yield from self._text(Content)
        self.header = None

    def _call(self, name: str) -> Reading[None]:
        cursor = self.cursor
        yield self.start(name)
        try:
            yield from cursor.skip_spaces()
            if (yield from cursor.peek(ENDS)) is None:
                yield from read_arguments(self)
            else:
                yield self.arguments("{}")
            yield self.end()
        except Unreadable as error:
            yield self._broken(str(error))
            for piece in self._pieces():
                if not piece:
                    yield None

    def _broken(self, why: str) -> CallBroken:
        self._open = False
        return CallBroken(self._count - 1, why)

    def _text(self, kind: type[Content] | type[Thought], *, first: str = "") -> Reading[None]:
        """Reads the text of a message as content or as a thought."""
        cursor, begun = self.cursor, False
        for piece in self._pieces(first):
            if self.thinking:
                self.spans[-1] = self.spans[-1][0], cursor.place
            if not piece:
                yield None
                continue
            text = PARAGRAPH + piece if kind in self._said and not begun else piece
            begun = True
            yield kind(text)
        if begun:
            self._said.add(kind)

    def _pieces(self, first: str = "") -> Iterator[str]:
        """Yields the text up to the mark that ends a message, and "" where more has to come; goes behind marks that end."""
        cursor = self.cursor
        while True:
            found = [(place, mark) for mark in MARKS if (place := cursor.text.find(mark)) >= 0]
            place = min(found)[0] if found else len(cursor.text) - (0 if cursor.ended else held_of(cursor.text, MARKS))
            text, first = first + cursor.take(place), ""
            if text:
                yield text
            if found:
                mark = min(found)[1]
                if mark in (MESSAGE, CONSTRAIN):
                    # it stands in a header alone
                    cursor.take(len(mark))
                    continue
                if mark in ENDS:
                    cursor.take(len(mark))
                return
            if cursor.ended:
                return
            yield ""
