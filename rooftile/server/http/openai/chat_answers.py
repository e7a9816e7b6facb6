"""The parts of a chat's answers: `ChatReaders` finds them in the text as it comes, and two functions write them in OpenAI's form.

Thoughts have two names on the wire: `reasoning_content`, which DeepSeek began with, and `reasoning`, which vLLM has come to.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

from rooftile.engine.chat.parts import Content, Part, Reader, Thought, WholeAnswer
from rooftile.engine.chat.thinking import ThoughtReader
from rooftile.server.engine.messages import AnswerPiece

Answer = tuple[int, int]
"""An answer by the places of its prompt and of itself."""


class ChatReaders:
    """The readers of a request's answers.

    Args:
        reader: makes the reader of an answer to a prompt.
        tokens_before: tells how many tokens begin before a place in an answer's text; None where the engine has made the text,
            and sends where its tokens begin.
    """

    def __init__(self, reader: Callable[[int], Reader], tokens_before: Callable[[Answer, int], int | None]) -> None:
        self._make = reader
        self._tokens_before = tokens_before
        self._readers: dict[Answer, Reader] = {}
        self._offsets: dict[Answer, list[int]] = {}

    def read(self, place: int, piece: AnswerPiece) -> list[Part]:
        """Returns the parts that a piece of an answer completes; each piece is read once."""
        answer = place, piece.index
        reader = self._readers.get(answer)
        if reader is None:
            reader = self._readers[answer] = self._make(place)
        self._offsets.setdefault(answer, []).extend(piece.offsets or ())
        parts = reader.feed(piece.text)
        return parts if piece.finish is None else parts + reader.finish()

    def thought_tokens(self, answer: Answer) -> int:
        """Returns how many tokens of an answer begin in its thought, marks left out, as far as the text was read."""
        reader = self._readers[answer]
        if not isinstance(reader, ThoughtReader):
            return 0
        begin, end = (self._count_before(answer, place) for place in (reader.begin, reader.end))
        return end - begin

    def _count_before(self, answer: Answer, place: int) -> int:
        count = self._tokens_before(answer, place) if place else 0
        return bisect_left(self._offsets[answer], place) if count is None else count


def delta_of(parts: Iterable[Part], *, thoughts: bool) -> dict[str, Any]:
    """Returns parts as the delta of a stream's chunk; empty if there is nothing to say.

    Args:
        parts: the parts.
        thoughts: whether the client wants thoughts.
    """
    said: dict[str, str] = {}
    for part in parts:
        names = ("reasoning_content", "reasoning") if isinstance(part, Thought) else ("content",)
        if isinstance(part, Content) or (isinstance(part, Thought) and thoughts):
            said |= {name: said.get(name, "") + part.text for name in names}
    return said


def message_of(answer: WholeAnswer, *, thoughts: bool) -> dict[str, Any]:
    """Returns an answer as a message."""
    thought = dict.fromkeys(("reasoning_content", "reasoning"), answer.thought) if answer.thought and thoughts else {}
    return {"role": "assistant", "content": answer.content, "refusal": None} | thought
