"""Reads prompts.

A prompt is a text, a list of token ids, or, like in vLLM, a dictionary with either of them and a `cache_salt`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput

Prompt = str | Sequence[int] | Mapping[str, Any]
KEYS = ("prompt", "prompt_token_ids", "cache_salt")
# a word has other tokens after these than at the start of a text: in a new line, and inside another word. Some letters would join
# the word in one token
INSIDE = ("\n", "a", "e", "z")


class ParsedPrompt(NamedTuple):
    """A prompt that has been read. `Engine.add` still checks its tokens."""

    text: str | None
    """The prompt's text; None if token ids were given."""
    tokens: Sequence[int]
    cache_salt: str
    """Requests share cached prefixes only if their salts are equal."""


def parse_prompt(prompt: Prompt, tokenizer: Tokenizer | None, cache_salt: str = "") -> ParsedPrompt:
    """Reads one prompt; a salt in the prompt's dictionary takes the place of `cache_salt`.

    Raises:
        InvalidInput: the prompt is a text that the tokenizer cannot read, or a dictionary without a prompt.
    """
    given: Any = prompt
    if isinstance(prompt, Mapping):
        strange = [key for key in prompt if key not in KEYS]
        if strange or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            keys = ", ".join(map(repr, prompt)) or "nothing"
            raise InvalidInput(f"the prompt has {keys}; must have 'prompt' or 'prompt_token_ids', and may have 'cache_salt'")
        if prompt.get("cache_salt") is not None:
            cache_salt = prompt["cache_salt"]
        given = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
    if not isinstance(given, str):
        return ParsedPrompt(None, given, cache_salt)
    if tokenizer is None:
        raise InvalidInput("the prompt is text and the model has no tokenizer; give token ids")
    return ParsedPrompt(given, tokenizer.encode(given), cache_salt)


def list_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Returns a list of prompts, also for a single prompt.

    Raises:
        InvalidInput: `prompts` is neither a prompt nor several.
    """
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidInput(f"prompts is {prompts!r}; must be a text, a list of token ids, or a list of such prompts")
    several: list[Any] = list(prompts)
    return [several] if several and _is_whole(several[0]) else several


def check_tokens(prompt: Sequence[int], vocabulary: int) -> list[int]:
    """Returns the token ids of a prompt as plain integers.

    Raises:
        InvalidInput: there is none, or one of them is outside 0 to vocabulary - 1.
    """
    if not isinstance(prompt, Iterable) or isinstance(prompt, str | bytes | Mapping):
        raise InvalidInput(f"the prompt is {str(prompt)[:40]!r}, of type {type(prompt).__name__}; must be a list of token ids")
    # an engine's thread checks prompts between two steps: plain integers are told apart as a whole, ten times as fast
    if type(prompt) is list and set(map(type, prompt)) == {int} and 0 <= min(prompt) <= max(prompt) < vocabulary:
        return prompt.copy()
    tokens = []
    for token in _iterated(prompt):
        if not _is_whole(token) or not 0 <= operator.index(token) < vocabulary:
            raise InvalidInput(f"the prompt has {repr(token)[:40]} for a token; the model has 0 to {vocabulary - 1}")
        tokens.append(operator.index(token))
    if not tokens:
        raise InvalidInput("the prompt has no token; it must have at least one")
    return tokens


def banned_sequences(tokenizer: Tokenizer | None, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the token sequences that spell words: with and without a space before them, at a text's start and inside it.

    Raises:
        InvalidInput: the tokenizer has no token for a word.
    """
    if tokenizer is None or not words:
        return ()
    before = {text: tokenizer.encode(text, special=False) for text in ("", *INSIDE)}
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        # a space after a word belongs to the next word's token; a word of nothing but spaces is what it is
        bare = word.strip() or word
        spelt = [(text, bare) for text in before] + [(text, " " + bare) for text in ("", "a") if not bare.isspace()]
        sequences = {
            tuple(ids[len(before[text]) :]): None
            for text, spelling in spelt
            # where both join in one token, the word has no token of its own
            if (ids := tokenizer.encode(text + spelling, special=False))[: len(before[text])] == before[text]
        }
        sequences.pop((), None)
        if not sequences:
            raise InvalidInput(f"bad_words has {word!r}, for which the tokenizer has no token; leave it out")
        found |= sequences
    # one that ends with another is caught with it
    return tuple(ids for ids in found if not any(ids[n:] in found for n in range(1, len(ids))))


def _iterated(prompt: Sequence[int]) -> list[Any]:
    """Returns a list of what a prompt yields; the prompt is a caller's object, and may raise anything."""
    try:
        return list(prompt)
    except Exception as error:
        raise InvalidInput(f"the prompt cannot be read: its iteration raised {type(error).__name__}: {error}") from error


def _is_whole(value: Any) -> bool:
    """Tells whether `value` is a whole number, also one of NumPy or PyTorch."""
    if type(value) is int:
        return True
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return False
    try:
        operator.index(value)
    except TypeError:
        # an array of several, or of fractions
        return False
    return True
