"""The parts of a chat's answers: `ChatReaders` finds them in the text as it comes, and two functions write them in OpenAI's form.

A call gets its id here: nine letters and digits, since the chat templates of Mistral take no others.

Thoughts have two names on the wire: `reasoning_content`, which DeepSeek began with, and `reasoning`, which vLLM has come to.
"""

from __future__ import annotations

import secrets
import string
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

from rooftile.engine.chat.harmony.reader import HarmonyReader
from rooftile.engine.chat.parts import (
    CallArguments,
    CallBroken,
    CallEnd,
    CallStart,
    Content,
    Part,
    Reader,
    Thought,
    WholeAnswer,
)
from rooftile.engine.chat.thinking import ThoughtReader
from rooftile.server.engine.messages import AnswerPiece

ID_LETTERS = string.ascii_letters + string.digits
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
        self._ended_calls: set[Answer] = set()
        self._broken: set[Answer] = set()
        self._offsets: dict[Answer, list[int]] = {}
        # how many of an answer's thoughts are counted for good, and their tokens
        self._thoughts: dict[Answer, tuple[int, int]] = {}

    def read(self, place: int, piece: AnswerPiece) -> list[Part]:
        """Returns the parts that a piece of an answer completes; each piece is read once."""
        answer = place, piece.index
        reader = self._readers.get(answer)
        if reader is None:
            reader = self._readers[answer] = self._make(place)
        self._offsets.setdefault(answer, []).extend(piece.offsets or ())
        parts = reader.feed(piece.text)
        if piece.finish is not None:
            parts += reader.finish()
        for part in parts:
            if isinstance(part, CallEnd):
                self._ended_calls.add(answer)
            elif isinstance(part, CallBroken):
                self._broken.add(answer)
        if piece.finish == "stop" and answer in self._ended_calls and answer not in self._broken:
            piece.finish = "tool_calls"
        return parts

    def thought_tokens(self, answer: Answer) -> int:
        """Returns how many tokens of an answer begin in its thought, marks left out, as far as the text was read."""
        reader = self._readers.get(answer)
        if not isinstance(reader, ThoughtReader | HarmonyReader):
            return 0
        # the places of thoughts that have ended stay: only the last one grows
        done, count = self._thoughts.get(answer, (0, 0))
        for place, (begin, end) in enumerate(reader.spans[done:], done + 1):
            own = self._count_before(answer, end) - self._count_before(answer, begin)
            if place < len(reader.spans):
                self._thoughts[answer] = place, count + own
            count += own
        return count

    def _count_before(self, answer: Answer, place: int) -> int:
        count = self._tokens_before(answer, place) if place else 0
        return bisect_left(self._offsets[answer], place) if count is None else count


def delta_of(parts: Iterable[Part], *, thoughts: bool) -> dict[str, Any]:
    """Returns parts as the delta of a stream's chunk; empty if there is nothing to say.

    Args:
        parts: the parts.
        thoughts: whether the client wants thoughts.
    """
    said: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, CallStart | CallArguments):
            calls = said.setdefault("tool_calls", [])
            if isinstance(part, CallStart):
                function = {"name": part.name, "arguments": ""}
                calls.append({"index": part.index, "id": call_id(), "type": "function", "function": function})
            elif calls and calls[-1]["index"] == part.index:
                calls[-1]["function"]["arguments"] += part.text
            else:
                calls.append({"index": part.index, "function": {"arguments": part.text}})
            continue
        names = ("reasoning_content", "reasoning") if isinstance(part, Thought) else ("content",)
        if isinstance(part, Content) or (isinstance(part, Thought) and thoughts):
            said |= {name: said.get(name, "") + part.text for name in names}
    return said


def message_of(answer: WholeAnswer, *, thoughts: bool) -> dict[str, Any]:
    """Returns an answer as a message."""
    thought = dict.fromkeys(("reasoning_content", "reasoning"), answer.thought) if answer.thought and thoughts else {}
    calls = [
        {"id": call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]  # fmt: skip
    content = answer.content if answer.content or not calls else None
    return {"role": "assistant", "content": content, "refusal": None} | thought | ({"tool_calls": calls} if calls else {})


def call_id() -> str:
    """Returns an id for a call that no other call has."""
    return "".join(secrets.choice(ID_LETTERS) for _ in range(9))
