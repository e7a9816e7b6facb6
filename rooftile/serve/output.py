"""What a caller gets back; the names are those of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from rooftile.serve.request import Answer, FinishReason, Logprob, Request, Top


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    token_ids has the token that ended it, if one did; text has not. A stop string leaves both, but for include_stop, and so do
    the tokens that are of it alone. finish_reason is "stop", "length" or "abort", None while it
    grows; stop_reason is the stop string or the id of stop_token_ids that ended it. logprobs has for each token its Logprob and
    those of the most likely ones, by id. score is that of a beam search.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answers to a prompt; or, in `error`, why it has none."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None


def output_of(request: Request, prompt: str | None = None) -> RequestOutput:
    """A request as it stands.

    What was told before is not made again: of a long answer a new token costs what one costs, and a copy of lists.
    """
    if not request.shown_prompt:
        # the engine's own stays as it is, whatever callers do to theirs
        request.shown_prompt = list(request.prompt)
    return RequestOutput(
        request_id=request.id,
        prompt=prompt,
        prompt_token_ids=request.shown_prompt,
        # beams on their way are more than come back
        outputs=[_completion(answer) for answer in request.answers[: request.params.n]],
        finished=not request.live,
        prompt_logprobs=_prompt_logprobs(request),
    )


def _completion(answer: Answer) -> CompletionOutput:
    params = answer.request.params
    tokens = answer.ids[len(answer.request.prompt) :]
    logprobs = None
    if params.logprobs is not None:
        # a stop string takes away what was told
        del answer.shown[len(tokens) :]
        told = len(answer.shown)
        new = zip(tokens[told:], answer.tops[told:], strict=True)
        answer.shown += [_shown(token, top, params.logprobs) for token, top in new]
        logprobs = answer.shown.copy()
    return CompletionOutput(
        index=answer.index,
        text="" if answer.words is None else answer.words.text,
        token_ids=tokens,
        cumulative_logprob=answer.logprob if params.logprobs is not None or answer.score is not None else None,
        logprobs=logprobs,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        score=answer.score,
    )


def _prompt_logprobs(request: Request) -> list[dict[int, Logprob] | None] | None:
    """Of each token of the prompt; None for the first, which follows nothing."""
    count = request.params.prompt_logprobs
    if count is None:
        return None
    if len(request.prompt_tops) < len(request.prompt) - 1:
        return [None]
    if not request.shown_prompt_logprobs:
        places = range(1, len(request.prompt))
        told = (_shown(request.prompt[place], request.prompt_tops[place], count) for place in places)
        request.shown_prompt_logprobs = [None, *told]
    return request.shown_prompt_logprobs


def _shown(token: int, top: Top, count: int) -> dict[int, Logprob]:
    best = zip(top.ids[:count], top.logprobs[:count], strict=True)
    shown = {id_: Logprob(logprob, rank) for rank, (id_, logprob) in enumerate(best, 1)}
    return shown | {token: Logprob(top.logprob, top.rank)}
