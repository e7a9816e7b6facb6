"""Chooses what an answer follows: a grammar, perhaps behind a thought; a grammar for each of its calls; or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftile.engine.chat.harmony.form import HeaderWatch
from rooftile.engine.chat.harmony.header import last_turn
from rooftile.engine.chat.thought_formats import ThoughtFormat, stage_of
from rooftile.engine.chat.tools.beginnings import Beginnings, Watch
from rooftile.engine.sampling.call_matcher import CallMatcher
from rooftile.engine.sampling.steering import BothSteerings, Steering
from rooftile.engine.sampling.thought_steering import steer_thoughts
from rooftile.errors import InvalidInput

if TYPE_CHECKING:
    from rooftile.engine.sampling.grammar import Grammars, Matcher
    from rooftile.engine.sampling.params import SamplingParams
    from rooftile.engine.text.tokenizer import Tokenizer


def steering_of(
    prompt: Sequence[int], params: SamplingParams, grammar: Matcher | None, *, ends: frozenset[int], vocabulary: int,
    tokenizer: Tokenizer | None, thoughts: ThoughtFormat | None, grammars: Grammars | None,
) -> Steering | None:  # fmt: skip
    """Returns what an answer follows; None for nothing.

    Args:
        prompt: the prompt's tokens.
        params: how to answer it.
        grammar: the beginning of the grammar of `params`; None if there is none.
        ends: the tokens that end the answer.
        vocabulary: the number of the model's logits.
        tokenizer: the model's tokenizer.
        thoughts: the model's marks around thoughts.
        grammars: compiles the grammars.

    Raises:
        InvalidInput: a budget is given for the thoughts of a model that marks none.
    """
    budget, calls = params.thinking_token_budget, None
    follows: Steering | None = grammar
    if grammar is not None and params.calls is not None and not params.calls.get("required"):
        assert tokenizer is not None, "a grammar needs a tokenizer"
        assert grammars is not None, "a grammar was compiled"
        beginnings = Beginnings.of(params.calls)
        in_headers = params.calls.get("in_headers", False)
        stage = stage_of(tokenizer, prompt, thoughts) if thoughts is not None and params.thinks and not in_headers else "after"
        calls = CallMatcher(
            tokenizer, prompt, grammar=grammar, vocabulary=vocabulary, several=params.calls.get("several", True),
            watch=HeaderWatch(beginnings, last_turn(tokenizer, prompt)) if in_headers else Watch(beginnings),
            long_tokens=grammars.long_tokens(beginnings.last_characters()),
            thoughts=None if thoughts is None or stage == "after" else (thoughts, stage),
        )  # fmt: skip
        follows = None
    if budget is not None or (follows is not None and params.thinks):
        if thoughts is not None and tokenizer is not None:
            follows = steer_thoughts(
                tokenizer, thoughts, prompt, vocabulary=vocabulary, ends=ends, budget=budget, grammar=follows
            )  # fmt: skip
        elif budget is not None:
            raise InvalidInput("thinking_token_budget is given, and the model marks no thoughts: name its reasoning_parser")
    return follows if calls is None else calls if follows is None else BothSteerings(follows, calls, vocabulary)
