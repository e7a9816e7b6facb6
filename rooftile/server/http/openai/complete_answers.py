"""Puts answers together from the pieces that the engine sends, and chooses the best of several."""

from __future__ import annotations

from dataclasses import dataclass, field

from rooftile.engine.chat.parts import WholeAnswer
from rooftile.server.engine.messages import AnswerPiece, Scored


@dataclass(slots=True)
class CompleteAnswer:
    """One answer."""

    texts: list[str] = field(default_factory=list)
    parts: WholeAnswer = field(default_factory=WholeAnswer)
    """What a chat's answer consists of."""
    tokens: int = 0
    logprobs: list[list[Scored]] = field(default_factory=list)
    offsets: list[int] | None = None
    finish: str | None = None
    stop: int | str | None = None
    logprob: float = 0.0

    def add(self, piece: AnswerPiece) -> None:
        """Adds a piece."""
        self.texts.append(piece.text)
        self.tokens = piece.tokens
        self.logprobs += piece.logprobs or ()
        if piece.offsets is not None:
            self.offsets = [*(self.offsets or ()), *piece.offsets]
        self.finish, self.stop = piece.finish, piece.stop
        self.logprob = piece.logprob or 0.0

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)


@dataclass(slots=True)
class Usage:
    """The tokens of a request."""

    prompt: int = 0
    cached: int = 0
    paged: int = 0
    """Tokens of prompts whose blocks the prefix cache had; what `cached` has not of them was read again for want of a state."""
    max_tokens: int | None = None
    """The most tokens that an answer to the longest prompt can have, if more are asked for; None otherwise."""
    completion: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tokens of each answer, by the places of its prompt and of itself."""
    thoughts: dict[tuple[int, int], int] | None = None
    """How many of them are thoughts; None where none are looked for."""

    def object(self) -> dict[str, object]:
        """Returns the tokens in OpenAI's words."""
        completion = sum(self.completion.values())
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        thoughts = {} if self.thoughts is None else {"reasoning_tokens": sum(self.thoughts.values())}
        paged = {"paged_tokens": self.paged} if self.paged > self.cached else {}
        return {
            "prompt_tokens": self.prompt, "completion_tokens": completion, "total_tokens": self.prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached} | paged,
        } | ({"completion_tokens_details": limit | thoughts} if limit | thoughts else {})  # fmt: skip

    def headers(self) -> dict[str, str]:
        """Returns the header that says how many tokens an answer can have, if more are asked for."""
        return {} if self.max_tokens is None else {"X-Max-Tokens": str(self.max_tokens)}


def best(answers: list[CompleteAnswer], n: int) -> list[CompleteAnswer]:
    """Returns the n answers with the highest logprob per token, the best first."""
    return sorted(answers, key=lambda answer: -answer.logprob / max(1, answer.tokens))[:n]
