"""Chooses what steers an answer with a thought, by the format of the model's thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftile.engine.chat.thought_formats import HARMONY, ThoughtFormat, stage_of
from rooftile.engine.sampling.channel_matcher import ChannelBudget, ChannelGrammar
from rooftile.engine.sampling.steering import Steering
from rooftile.engine.sampling.thought_matcher import ThoughtMatcher

if TYPE_CHECKING:
    from rooftile.engine.text.tokenizer import Tokenizer


def steer_thoughts(
    tokenizer: Tokenizer, form: ThoughtFormat, prompt: Sequence[int], *, vocabulary: int, ends: frozenset[int],
    budget: int | None, grammar: Steering | None,
) -> Steering | None:  # fmt: skip
    """Returns what an answer follows that may have a thought; None if it follows nothing.

    Args:
        tokenizer: the model's tokenizer.
        form: the model's marks around thoughts.
        prompt: the prompt's tokens.
        vocabulary: the number of the model's logits.
        ends: the tokens that end an answer; with a grammar they do not end a thought.
        budget: the most tokens of thoughts; None for any number.
        grammar: what the answer follows behind its thought; None for free text.

    Raises:
        InvalidInput: a mark that is needed is no token of the model.
    """
    if budget is None and grammar is None:
        return None
    if form is HARMONY:
        if grammar is not None:
            return ChannelGrammar(tokenizer, prompt, vocabulary=vocabulary, ends=ends, budget=budget, grammar=grammar)
        assert budget is not None
        return ChannelBudget(tokenizer, prompt, vocabulary=vocabulary, budget=budget)
    stage = stage_of(tokenizer, prompt, form)
    if stage == "after":
        return grammar
    return ThoughtMatcher(
        tokenizer, form, stage, prompt, vocabulary=vocabulary, ends=ends, budget=budget, grammar=grammar
    )  # fmt: skip
