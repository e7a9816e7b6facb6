"""What was asked, and the answers as they grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rooftile.kvcache import BlockTable
from rooftile.serve.beam_search import BeamSearch
from rooftile.serve.sampling.params import SamplingParams
from rooftile.serve.text.detokenizer import Detokenizer

FinishReason = Literal["stop", "length", "abort"]


class Top(NamedTuple):
    """Of a token: its logprob and rank, and the most likely tokens in its place with theirs."""

    logprob: float
    rank: int
    ids: list[int]
    logprobs: list[float]


class Logprob(NamedTuple):
    """Of a token in one place: natural logarithm of its probability, and how many were more likely, plus 1."""

    logprob: float
    rank: int


@dataclass(slots=True, eq=False)
class Answer:
    """One answer to a request: its tokens, and how far the cache has them.

    Its tokens `ids` are known. `pending` more are being computed and will be told. Keys and values of the first `planned` are in
    the cache, or on their way into it.
    """

    request: Request
    index: int
    seed: int
    ids: list[int]
    pending: int = 0
    planned: int = 0
    table: BlockTable | None = None
    slot: int = -1
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    tops: list[Top] = field(default_factory=list)
    """Of each token, if logprobs were asked for."""
    shown: list[dict[int, Logprob]] = field(default_factory=list)
    """The same as callers are told it, as far as they were."""
    logprob: float = 0.0
    """The sum over the tokens, if they were asked for."""
    score: float | None = None
    """In a beam search."""
    words: Detokenizer | None = None
    """Its text as it grows, if the model has a tokenizer."""

    @property
    def generated(self) -> int:
        """Tokens of the answer that are known."""
        return len(self.ids) - len(self.request.prompt)

    @property
    def behind(self) -> int:
        """Tokens that the model has not read yet; one in steady decoding."""
        return len(self.ids) + self.pending - self.planned

    @property
    def wants_more(self) -> bool:
        """Whether another token is due after those on their way."""
        return self.finish_reason is None and self.generated + self.pending < self.request.limit


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, and how it is to be answered.

    limit is how many tokens an answer may have: max_tokens, or what the model's length leaves.
    """

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    limit: int
    ends: frozenset[int]
    """Tokens that end an answer."""
    salt: str = ""
    answers: list[Answer] = field(default_factory=list)
    begun: bool = False
    """Whether the prompt has been read once: then each answer goes its own way."""
    prompt_tops: dict[int, Top] = field(default_factory=dict)
    """Of the prompt's tokens, by position, if they were asked for."""
    search: BeamSearch | None = None
    shown_prompt: list[int] = field(default_factory=list)
    shown_prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    """The prompt and its logprobs as callers are told them, all of them the same lists; empty before."""

    @property
    def top_count(self) -> int | None:
        """How many of the most likely tokens are asked for; None for no logprobs at all."""
        return self.params.logprobs if self.search is None else self.search.keep

    @property
    def live(self) -> list[Answer]:
        """Answers that are not complete."""
        return [answer for answer in self.answers if answer.finish_reason is None]

    @property
    def pending(self) -> bool:
        """Whether something of it is being computed."""
        return any(answer.pending for answer in self.answers)
