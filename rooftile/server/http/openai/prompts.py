"""A prompt as its client gets it back: the logprobs of its tokens, in the form that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rooftile.server.engine.messages import Ranked, Scored
from rooftile.server.http.openai.objects import legacy_logprobs, number

if TYPE_CHECKING:
    # slow to import, and needed only when the engine is ready
    from rooftile.engine.text.tokenizer import Tokenizer


class ScoredPrompt(NamedTuple):
    """The logprobs of a prompt's tokens, in the forms that are asked for."""

    echoed: dict[str, list[Any]] | None
    """The form of completions: as an answer's logprobs, with null for the first token, which follows nothing."""
    listed: list[dict[str, Any] | None] | None
    """As vLLM writes prompt_logprobs: for each token an object by token ids."""


class PromptForms(NamedTuple):
    """How many of the most likely tokens each form has; None for a form that is not asked for."""

    echoed: int | None
    listed: int | None
    skip_special: bool

    @property
    def most(self) -> int | None:
        """How many of them the engine must send; None if no logprobs are asked for."""
        return max((count for count in (self.echoed, self.listed) if count is not None), default=None)


def score_prompt(tokenizer: Tokenizer | None, ids: Sequence[int], ranked: Sequence[Ranked], forms: PromptForms) -> ScoredPrompt:
    """Returns the logprobs of a prompt in the forms that are asked for; `ranked` has all tokens but the first."""
    silent = [tokenizer is None or tokenizer.is_silent(id, forms.skip_special) for id in ids]
    first = silent.index(False) if False in silent else len(ids)

    def text_at(place: int, id: int) -> str:
        if tokenizer is None:
            return ""
        return tokenizer.first_text_of(id) if place <= first else tokenizer.text_of(id)

    def echoed(count: int) -> dict[str, list[Any]]:
        scored = [[Scored(ids[0], 0.0, text_at(0, ids[0]))]]
        for place, one in enumerate(ranked, 1):
            best = zip(one.ids[:count], one.logprobs[:count], strict=True)
            own = Scored(ids[place], one.logprob, text_at(place, ids[place]))
            scored.append([own, *(Scored(id, logprob, text_at(place, id)) for id, logprob in best)])
        found = legacy_logprobs(scored, _offsets(tokenizer, ids, forms.skip_special))
        found["token_logprobs"][0] = found["top_logprobs"][0] = None
        return found

    def listed(count: int) -> list[dict[str, Any] | None]:
        found: list[dict[str, Any] | None] = [None]
        for place, one in enumerate(ranked, 1):
            best = zip(one.ids[:count], one.logprobs[:count], strict=True)
            several = [(id, logprob, rank) for rank, (id, logprob) in enumerate(best, 1)]
            several.append((ids[place], one.logprob, one.rank))
            found.append({str(id): _ranked(logprob, rank, text_at(place, id)) for id, logprob, rank in several})
        return found

    return ScoredPrompt(
        None if forms.echoed is None else echoed(forms.echoed), None if forms.listed is None else listed(forms.listed)
    )


def _ranked(logprob: float, rank: int, text: str) -> dict[str, Any]:
    return {"logprob": number(logprob), "rank": rank, "decoded_token": text}


def _offsets(tokenizer: Tokenizer | None, ids: Sequence[int], skip_special: bool) -> list[int]:
    """Returns where the tokens of a prompt begin in its text."""
    if tokenizer is None:
        return [0] * len(ids)
    from rooftile.engine.text.border import prompt_text
    from rooftile.engine.text.incremental_decoder import IncrementalDecoder

    decoder, most = IncrementalDecoder(tokenizer, skip_special), len(prompt_text(tokenizer, ids, skip_special))
    for id in ids:
        decoder.add(id)
    decoder.finish()
    return [min(offset, most) for offset in decoder.begins]
