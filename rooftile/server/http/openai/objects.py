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
        chat: whether they belong to a chat.
    """

    def __init__(self, id: str, model: str, created: int, *, chat: bool) -> None:
        self._chat = chat
        self._head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{id}", "created": created, "model": model}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request without a stream."""
        return self._head | {"object": self._kind(""), "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, *, with_usage: bool) -> dict[str, Any]:
        """Returns a chunk of a stream; with `with_usage` it has a usage, which may be null."""
        return self._head | {"object": self._kind(".chunk"), "choices": choices} | ({"usage": usage} if with_usage else {})

    def choice(
        self, index: int, said: str | dict[str, Any], finish: str | None, stop: int | str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Returns one whole answer: a completion's text, or a chat's message."""
        return self._choice(index, {"message" if self._chat else "text": said}, finish, stop, logprobs)

    def delta(
        self, index: int, said: str | dict[str, Any], finish: str | None, stop: int | str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Returns what is new in an answer: a completion's text, or a chat's delta."""
        return self._choice(index, {"delta" if self._chat else "text": said}, finish, stop, logprobs)

    def logprobs(
        self, logprobs: list[list[Scored]], offsets: list[int] | None, *, start: int = 0,
        before: dict[str, list[Any]] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Returns logprobs in the form of the route.

        Args:
            logprobs: for each token the token itself, then the most likely ones.
            offsets: where the tokens begin in the answer's text; None if there is no text.
            start: characters before the answer's text.
            before: what completions write of the echoed prompt's tokens.
        """
        if self._chat:
            content = [_scored(token) | {"top_logprobs": [_scored(each) for each in top]} for token, *top in logprobs]
            return {"content": content, "refusal": None}
        found = legacy_logprobs(logprobs, [start + offset for offset in offsets or [0] * len(logprobs)])
        return found if before is None else {name: before[name] + values for name, values in found.items()}

    def opening(self, index: int) -> dict[str, Any]:
        """Returns the first chunk of an answer in a chat, which says who speaks."""
        return self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None, None, None)

    def _kind(self, suffix: str) -> str:
        return f"chat.completion{suffix}" if self._chat else "text_completion"

    def _choice(
        self, index: int, said: dict[str, Any], finish: str | None, stop: int | str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {"index": index} | said | {"logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}


def legacy_logprobs(logprobs: list[list[Scored]], offsets: list[int]) -> dict[str, list[Any]]:
    """Returns logprobs as completions have them; each token comes with its own score first, then the most likely ones."""
    return {
        "tokens": [token.text for token, *_ in logprobs],
        "token_logprobs": [number(token.logprob) for token, *_ in logprobs],
        "top_logprobs": [_by_text(token, top) for token, *top in logprobs],
        "text_offset": offsets,
    }


def _by_text(token: Scored, top: Sequence[Scored]) -> dict[str, float]:
    """Returns logprobs by the tokens' texts; of tokens with one text the most likely counts."""
    found: dict[str, float] = {}
    for each in (*top, token):
        found.setdefault(each.text, number(each.logprob))
    return found


def _scored(token: Scored) -> dict[str, Any]:
    raw = token.text.encode() if token.raw is None else token.raw
    return {"token": token.text, "logprob": number(token.logprob), "bytes": list(raw)}


def number(value: float) -> float:
    """Returns a logprob for JSON, which has neither minus infinity nor NaN."""
    return value if value > LEAST else LEAST
