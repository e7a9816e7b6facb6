"""The parts of a model's answer, and the protocol of the readers that find them in its text.

A reader gets the text of an answer in pieces, as it grows, and returns parts. Pieces may be cut anywhere: the joined parts are
those of the whole text. What may still become a mark, such as the first half of `<tool_call>`, is kept until it is one or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text that the model has thought before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls a function; calls are counted from 0 and do not overlap."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments: all pieces together are a JSON object as text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments are complete."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The call has begun and has no right end; its arguments are what came, and `why` is a sentence."""

    index: int
    why: str


Part = Content | Thought | CallStart | CallArguments | CallEnd | CallBroken


class Reader(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Part]:
        """Takes the next piece of the text, and returns the parts that are certain now."""
        ...

    def finish(self) -> list[Part]:
        """Returns what is left when the answer has ended; nothing is fed after that."""
        ...


class PlainReader:
    """Reads a text without marks: all of it is content."""

    def feed(self, text: str) -> list[Part]:
        """Returns the text as content."""
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        """Returns nothing: nothing is kept."""
        return []


@dataclass(slots=True)
class ToolCall:
    """A call of a function that a model has written.

    Args:
        name: the function's name.
        arguments: a JSON object as text; only a part of one if the call is broken.
        broken: why the call has no right end; None if it has one.
    """

    name: str
    arguments: str = ""
    broken: str | None = None


@dataclass(slots=True)
class WholeAnswer:
    """An answer's parts put together.

    Args:
        content: the text for the user; empty if there is none.
        thought: what the model has thought; empty if nothing.
        calls: its calls, in their order.
    """

    content: str = ""
    thought: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        """Adds parts, in their order."""
        for part in parts:
            if isinstance(part, Content):
                self.content += part.text
            elif isinstance(part, Thought):
                self.thought += part.text
            elif isinstance(part, CallStart):
                self.calls.append(ToolCall(part.name))
            elif isinstance(part, CallArguments):
                self.calls[part.index].arguments += part.text
            elif isinstance(part, CallBroken):
                self.calls[part.index].broken = part.why


def read_whole(reader: Reader, text: str) -> WholeAnswer:
    """Returns the parts of a whole answer.

    Example:
        >>> read_whole(PlainReader(), "Good day.").content
        'Good day.'
    """
    answer = WholeAnswer()
    answer.add(reader.feed(text))
    answer.add(reader.finish())
    return answer


def joined(parts: Iterable[Part]) -> list[Part]:
    """Returns parts in which neighbours of one kind are one: the same for every cut of a text.

    Example:
        >>> joined([Content("Good "), Content("day.")])
        [Content(text='Good day.')]
    """
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + part.text)
        elif isinstance(part, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
            found[-1] = CallArguments(part.index, last.text + part.text)
        else:
            found.append(part)
    return found
