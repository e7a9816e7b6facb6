"""The answers in OpenAI's form: whole, and as chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rooftile.server.engine.messages import Scored

# in logprobs, in place of minus infinity and NaN, which JSON has not
LEAST = -9999.0


class Objects:
    """Writes the objects of one request.

    Args:
        id: the request's id.
        model: the model's name.
        created: seconds since 1970.
        chat: whether they are those of a chat.
    """

    def __init__(self, id: str, model: str, created: int, *, chat: bool) -> None:
        self._chat = chat
        self._head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{id}", "created": created, "model": model}
        # characters of each answer before its next chunk
        self._offsets: dict[int, int] = {}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request without a stream."""
        return self._head | {"object": self._kind(""), "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, *, with_usage: bool) -> dict[str, Any]:
        """Returns a chunk of a stream; with `with_usage` it has a usage, which may be null."""
        return self._head | {"object": self._kind(".chunk"), "choices": choices} | ({"usage": usage} if with_usage else {})

    def choice(
        self, index: int, text: str, finish: str | None, stop: int | str | None, logprobs: list[list[Scored]] | None
    ) -> dict[str, Any]:
        """Returns one whole answer."""
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
        return self._choice(index, said, finish, stop, logprobs)

    def delta(
        self, index: int, text: str, finish: str | None, stop: int | str | None, logprobs: list[list[Scored]] | None
    ) -> dict[str, Any]:
        """Returns what is new in an answer."""
        said = {"delta": {"content": text}} if self._chat else {"text": text}
        return self._choice(index, said, finish, stop, logprobs)

    def opening(self, index: int) -> dict[str, Any]:
        """Returns the first chunk of an answer in a chat, which says who speaks."""
        return self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None, None, None)

    def _kind(self, suffix: str) -> str:
        return f"chat.completion{suffix}" if self._chat else "text_completion"

    def _choice(
        self, index: int, said: dict[str, Any], finish: str | None, stop: int | str | None, logprobs: list[list[Scored]] | None
    ) -> dict[str, Any]:
        shown = None if logprobs is None else self._chat_logprobs(logprobs) if self._chat else self._logprobs(index, logprobs)
        return {"index": index} | said | {"logprobs": shown, "finish_reason": finish, "stop_reason": stop}

    def _chat_logprobs(self, logprobs: list[list[Scored]]) -> dict[str, Any]:
        content = [_scored(token) | {"top_logprobs": [_scored(each) for each in top]} for token, *top in logprobs]
        return {"content": content, "refusal": None}

    def _logprobs(self, index: int, logprobs: list[list[Scored]]) -> dict[str, Any]:
        offsets, place = [], self._offsets.get(index, 0)
        for token, *_ in logprobs:
            offsets.append(place)
            place += len(token.text)
        self._offsets[index] = place
        return {
            "tokens": [token.text for token, *_ in logprobs],
            "token_logprobs": [_number(token.logprob) for token, *_ in logprobs],
            "top_logprobs": [_by_text(token, top) for token, *top in logprobs],
            "text_offset": offsets,
        }


def _by_text(token: Scored, top: Sequence[Scored]) -> dict[str, float]:
    """Returns logprobs by the tokens' texts; of tokens with one text the most likely counts."""
    found: dict[str, float] = {}
    for each in (*top, token):
        found.setdefault(each.text, _number(each.logprob))
    return found


def _scored(token: Scored) -> dict[str, Any]:
    raw = token.text.encode() if token.raw is None else token.raw
    return {"token": token.text, "logprob": _number(token.logprob), "bytes": list(raw)}


def _number(value: float) -> float:
    """Returns a logprob for JSON, which has neither minus infinity nor NaN."""
    return value if value > LEAST else LEAST
