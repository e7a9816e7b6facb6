"""The outputs that a caller gets: a `RequestOutput` with one `CompletionOutput` per answer, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from rooftile.drawing import notebook as shown
from rooftile.engine.chat.parts import ToolCall
from rooftile.engine.requests.request import Answer, FinishReason, Logprob, Request, Top
from rooftile.engine.text.growing import TextSnapshot


class _Snapshot(NamedTuple):
    """An answer at one moment: lists that it shares with the growing answer, and how much of each was there.

    The engine only appends to these lists, or replaces them; it never changes what is in them. So a snapshot stays true while
    the answer grows, and nothing is copied until it is read.
    """

    ids: list[int]
    first: int
    last: int
    stays: int  # tokens that no stop string can take away any more
    text: TextSnapshot | None
    logprobs: list[dict[int, Logprob]] | None

    def read(self, name: str) -> object:
        """Returns a list or a text of the reader's own."""
        if name == "token_ids":
            return self.ids[self.first : self.last]
        if name == "text":
            return "" if self.text is None else self.text.read()
        return None if self.logprobs is None else self.logprobs[: self.last - self.first]


class _Lazy:
    """Reads text, token_ids and logprobs from a snapshot when they are first asked for."""

    __slots__ = ("_snapshot",)
    _snapshot: _Snapshot

    def _share(self, snapshot: _Snapshot) -> None:
        self._snapshot = snapshot

    def __getattr__(self, name: str) -> Any:
        # called only for an attribute that is not set
        if name not in ("logprobs", "text", "token_ids"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = self._snapshot.read(name)
        setattr(self, name, value)
        return value

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """Copies and pickles hold the fields, and nothing that is shared with the engine."""
        return None, {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]


@dataclass(slots=True)
class CompletionOutput(_Lazy):
    """One answer, complete or still growing; a later step changes nothing in it.

    Args:
        index: the place of the answer among the n of its request.
        text: what the tokens add to the prompt's text, without the token that ended the answer, and without the stop string
            unless include_stop is set. Prompt and text together are what the tokenizer decodes for all tokens.
        token_ids: the tokens, with the end token if one ended the answer. The tokens of a stop string are left out.
        cumulative_logprob: the sum of the tokens' logprobs, if they were asked for, or of a beam's.
        logprobs: for each token its `Logprob` and the most likely tokens' `Logprob`s, by token id; None if not asked for.
        finish_reason: "stop", "length" or "abort"; None while the answer grows.
        stop_reason: the stop string, or the id out of stop_token_ids, that ended the answer. With the reason "abort" it may be a
            sentence: every token was forbidden, and by what.
        score: the score in a beam search.
        tool_calls: for answers of `LLM.chat` with tools: the calls, in their order, each with a name and arguments as JSON text;
            `broken` says why one has no right end.
        reasoning, content: for answers of `LLM.chat` of a model that marks its thoughts: these, None if there are none, and the
            rest of the text. None for others.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning: str | None = None
    content: str | None = None

    def __repr__(self) -> str:
        return f"CompletionOutput({self.index}: {_said(self)}, {shown.counted(len(self.token_ids), 'token')})"

    def _repr_html_(self) -> str:
        return shown.card(shown.table(_HEAD, [_cells(self)], words=_WORDS))


@dataclass(slots=True)
class RequestOutput:
    """The answers to one prompt; or, in `error`, the reason why it has none."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    num_cached_tokens: int | None = None
    """How many tokens of the prompt the prefix cache had; None if the request has not run yet."""
    cache_hit: str | None = None
    """The same in words, with the reason why not more: "128 of 410 tokens hit: pages of 400 are there, no state is kept between
    128 and 400"."""

    def __repr__(self) -> str:
        asked = shown.short(self.prompt) if self.prompt is not None else shown.counted(len(self.prompt_token_ids), "token")
        answers = [_said(one) for one in self.outputs[:2]]
        answers += [f"{len(self.outputs) - 2:,} more"] * (len(self.outputs) > 2)
        said = shown.short(self.error, 2 * shown.LETTERS) if self.error else ", ".join(answers) or "no answer yet"
        return f"RequestOutput({self.request_id}: {asked} -> {said})"

    def _repr_html_(self) -> str:
        """Shows the whole prompt, and the whole text of each answer."""
        prompt = f"{self.prompt_token_ids}" if self.prompt is None else self.prompt
        cached = f", {self.num_cached_tokens:,} of them cached" if self.num_cached_tokens else ""
        above = shown.sentence(f"prompt, {shown.counted(len(self.prompt_token_ids), 'token')}{cached}")
        if self.error:
            return shown.card(above, shown.preformatted(prompt), shown.sentence(f"error: {self.error}"))
        return shown.card(above, shown.preformatted(prompt), shown.table(_HEAD, map(_cells, self.outputs), words=_WORDS))


# the columns of answers in a notebook, and those that hold words
_HEAD, _WORDS = ("answer", "text", "tokens", "ended by"), (1, 3)


def _said(one: CompletionOutput) -> str:
    """Returns an answer's text, or its tokens where it has none, with what ended it."""
    said = shown.short(one.text) if one.text else shown.short(f"{one.token_ids}").strip("'")
    return f"{said} ({one.finish_reason or 'still growing'})"


def _cells(one: CompletionOutput) -> tuple[object, ...]:
    ended = one.finish_reason or "still growing"
    stop = "" if one.stop_reason is None else f": {one.stop_reason!r}"
    return one.index, one.text if one.text else f"{one.token_ids}", f"{len(one.token_ids):,}", f"{ended}{stop}"


def output_of(request: Request, prompt: str | None = None) -> RequestOutput:
    """Returns a request's state of this moment; it costs as much as the new tokens, however long the answers are."""
    if not request.shown_prompt:
        # a copy for callers, who may change theirs; the engine's own stays as it is
        request.shown_prompt = list(request.prompt)
    return RequestOutput(
        request_id=request.id,
        prompt=prompt,
        prompt_token_ids=request.shown_prompt,
        # a beam search has more beams than it returns answers
        outputs=[] if request.error is not None else [_completion(answer) for answer in request.answers[: request.params.n]],
        finished=not request.live,
        error=request.error,
        num_cached_tokens=request.cached_tokens,
        cache_hit=request.cache_hit,
        prompt_logprobs=_prompt_logprobs(request),
    )


def _completion(answer: Answer) -> CompletionOutput:
    params = answer.request.params
    first, last = len(answer.request.prompt), len(answer.ids)
    logprobs = None
    if params.logprobs is not None:
        if len(answer.shown) > last - first:
            # a stop string has taken tokens away that were shown; a new list, since earlier outputs share the old one
            answer.shown = answer.shown[: last - first]
        shown = len(answer.shown)
        new = zip(answer.ids[first + shown :], answer.tops[shown:], strict=True)
        for place, (token, top) in enumerate(new, first + shown):
            answer.shown.append(logprobs_at(token, top, params.logprobs, answer.text_at(place)))
        logprobs = answer.shown
    text = None if answer.detokenizer is None else answer.detokenizer.snapshot()
    stays = last - first
    if answer.finish_reason is None and answer.detokenizer is not None:
        stays = min(stays, answer.detokenizer.tokens_released)
    # text, token_ids and logprobs stay unset: they are read from the snapshot
    output = CompletionOutput.__new__(CompletionOutput)
    output._share(_Snapshot(answer.ids, first, last, stays, text, logprobs))
    output.index = answer.index
    output.cumulative_logprob = answer.logprob if params.logprobs is not None or answer.score is not None else None
    output.finish_reason = answer.finish_reason
    output.stop_reason = answer.stop_reason
    output.score = answer.score
    output.reasoning = output.content = None
    output.tool_calls = []
    return output


def _prompt_logprobs(request: Request) -> list[dict[int, Logprob] | None] | None:
    """Returns the logprobs of the prompt's tokens; None for the first token, which follows nothing."""
    count = request.params.prompt_logprobs
    if count is None:
        return None
    if len(request.prompt_tops) < len(request.prompt) - 1:
        return [None]
    if not request.shown_prompt_logprobs:
        places, text_at = range(1, len(request.prompt)), request.answers[0].text_at
        made = (logprobs_at(request.prompt[place], request.prompt_tops[place], count, text_at(place)) for place in places)
        request.shown_prompt_logprobs = [None, *made]
    return request.shown_prompt_logprobs


def logprobs_at(token: int, top: Top, count: int, text_of: Callable[[int], str] | None) -> dict[int, Logprob]:
    """Returns the logprobs of one place by token id: the `count` most likely tokens, and the token that was taken."""
    best = zip(top.ids[:count], top.logprobs[:count], strict=True)
    shown = {id_: Logprob(logprob, rank) for rank, (id_, logprob) in enumerate(best, 1)}
    shown[token] = Logprob(top.logprob, top.rank)
    if text_of is not None:
        for id_, one in shown.items():
            one.decoded_token = text_of(id_)
    return shown
