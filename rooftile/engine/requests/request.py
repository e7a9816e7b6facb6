"""A request and its answers while they are being computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rooftile.engine.adapters.adapters import LoadedAdapter
from rooftile.engine.sampling.beam_search import BeamSearch
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.sampling.steering import Steering
from rooftile.engine.speculation.ngrams import Guesser
from rooftile.engine.speculation.pace import Pace
from rooftile.engine.text.detokenizer import Detokenizer
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.kvcache import BlockTable

FinishReason = Literal["stop", "length", "abort"]


class Top(NamedTuple):
    """A token's logprob and rank, and the most likely tokens in its place with their logprobs."""

    logprob: float
    rank: int
    ids: list[int]
    logprobs: list[float]


class _Scored(NamedTuple):
    logprob: float
    rank: int


class Logprob(_Scored):
    """The natural logarithm of a token's probability in one place, and its rank: the number of more likely tokens, plus 1.

    It unpacks to these two. `decoded_token` is the token's text, or None if the model has no tokenizer.
    """

    decoded_token: str | None = None


@dataclass(slots=True, eq=False)
class Answer:
    """One answer to a request: its tokens, and how many of them the KV cache holds.

    The tokens in `ids`, prompt included, are known. `pending` more are being computed and will arrive. Keys and values of the
    first `planned` tokens are in the cache, or are being written by a step in flight.

    The list `ids` is shared with the outputs that callers hold: it is appended to or replaced, never changed in place.
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
    """One per generated token, if logprobs were asked for."""
    shown: list[dict[int, Logprob]] = field(default_factory=list)
    """The same in the form that callers see, as far as they have seen it; shared with their outputs, like `ids`."""
    logprob: float = 0.0
    """The sum over the generated tokens, if logprobs were asked for."""
    score: float | None = None
    """The score in a beam search."""
    grammar: Steering | None = None
    """The answer's place in its grammar, or in its thought and then in a grammar."""
    detokenizer: Detokenizer | None = None
    """Builds the text, if the model has a tokenizer."""
    pace: Pace | None = None
    """How long its drafts may be, once there was to be one."""
    guesser: Guesser | None = None
    """Guesses how it goes on, likewise."""
    read_by_draft: int = 0
    """How many of its first tokens a draft model has read into the blocks of `table`."""
    silent: int = 0
    """How many of the first tokens are known to have no text."""

    @property
    def generated(self) -> int:
        """How many tokens of the answer are known."""
        return len(self.ids) - len(self.request.prompt)

    def text_at(self, place: int) -> Callable[[int], str] | None:
        """Returns what tells the text of a token at a place of `ids`; None without a tokenizer."""
        tokenizer = self.request.tokenizer
        if tokenizer is None:
            return None
        skip = self.request.params.skip_special_tokens
        while self.silent < place and tokenizer.is_silent(self.ids[self.silent], skip):
            self.silent += 1
        return tokenizer.text_of if self.silent < place else tokenizer.first_text_of

    @property
    def unread(self) -> int:
        """How many tokens the model has not read yet; one in steady decoding."""
        return len(self.ids) + self.pending - self.planned

    @property
    def waits_for_host(self) -> bool:
        """Whether the next token waits until the pending ones have reached the host."""
        grammar = self.grammar
        return self.pending > 0 and (self.request.needs_host or (grammar is not None and grammar.free <= self.pending))

    @property
    def wants_more(self) -> bool:
        """Whether another token is due after the pending ones."""
        request = self.request
        return self.finish_reason is None and len(self.ids) - len(request.prompt) + self.pending < request.limit


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and its answers.

    `limit` is the most tokens that an answer may have: max_tokens, or less where the longest sequence leaves less.
    """

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    limit: int
    ends: frozenset[int]
    """Tokens that end an answer."""
    cache_salt: str = ""
    urgent: bool = False
    """Whether it has waited so long that it comes before all others (see `WaitingQueue`)."""
    adapter: LoadedAdapter | None = None
    answers: list[Answer] = field(default_factory=list)
    prefilled: bool = False
    """Whether the prompt has been read once; from then on each answer runs by itself."""
    kept: BlockTable | None = None
    """The prompt's blocks without its last token, for answers that wait until there is a slot or room for them."""
    prompt_tops: dict[int, Top] = field(default_factory=dict)
    """Logprobs of the prompt's tokens by position, if they were asked for."""
    search: BeamSearch | None = None
    banned: tuple[tuple[int, ...], ...] = ()
    """Token sequences that an answer must not have."""
    needs_host: bool = False
    """Whether an answer sits steps out until its last token has reached the host, which then decides: which beams go on, which
    tokens would complete a bad word. A grammar decides by itself (see `Answer.waits_for_host`)."""
    tokenizer: Tokenizer | None = None
    """The model's tokenizer, which has the texts of single tokens."""
    cached_tokens: int | None = None
    """How many tokens of the prompt the prefix cache had when the request first ran."""
    paged_tokens: int = 0
    """How many tokens of the prompt had their blocks in the prefix cache then: the prompt leaves an earlier one there."""
    cache_hit: str | None = None
    """The same in words, with the reason why not more."""
    error: str | None = None
    """Why the request has no answers, if it failed by itself."""
    shown_prompt: list[int] = field(default_factory=list)
    """The prompt as callers see it, the same list in each output; empty before the first output."""
    shown_prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    """The prompt's logprobs as callers see them, likewise."""

    @property
    def top_count(self) -> int | None:
        """How many of the most likely tokens are asked for; None if no logprobs are."""
        return self.params.logprobs if self.search is None else self.search.keep

    @property
    def order(self) -> tuple[bool, int, int]:
        """Its place among requests: the smallest first."""
        return not self.urgent, self.params.priority, self.id

    @property
    def live(self) -> list[Answer]:
        """The answers that are not complete."""
        return [answer for answer in self.answers if answer.finish_reason is None]

    @property
    def queued(self) -> list[Answer]:
        """The answers that are not complete and do not run."""
        return [answer for answer in self.answers if answer.finish_reason is None and answer.slot < 0]
