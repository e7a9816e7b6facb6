"""What a prompt may be: a text, token ids, or a dictionary with either and a salt, as users of vLLM write it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rooftile.errors import InvalidInput
from rooftile.serve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class Asked(NamedTuple):
    """A prompt as it is understood: its text, if it was one, its tokens, and under which salt its prefixes are shared."""

    text: str | None
    tokens: Sequence[int]
    salt: str


def asked(prompt: Prompt, tokenizer: Tokenizer | None, salt: str = "") -> Asked:
    """Reads a prompt.

    Raises:
        InvalidInput: it is a text that the tokenizer does not read, or a dictionary without a prompt.
    """
    given: Any = prompt
    if isinstance(prompt, Mapping):
        strange = [key for key in prompt if key not in KEYS]
        if strange or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            keys = ", ".join(map(repr, prompt)) or "nothing"
            raise InvalidInput(f"the prompt has {keys}; must have 'prompt' or 'prompt_token_ids', and may have 'cache_salt'")
        if prompt.get("cache_salt") is not None:
            salt = prompt["cache_salt"]
        given = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
    if not isinstance(given, str):
        # the engine looks at each of them
        return Asked(None, given, salt)
    if tokenizer is None:
        raise InvalidInput("the prompt is text and the model has no tokenizer; give token ids")
    return Asked(given, tokenizer.encode(given), salt)


def listed(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A list of prompts, also of a single one.

    Raises:
        InvalidInput: it is neither.
    """
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidInput(f"prompts is {prompts!r}; must be a text, a list of token ids, or a list of such prompts")
    several: list[Any] = list(prompts)
    return [several] if several and _is_whole(several[0]) else several


def tokens_of(prompt: Sequence[int], vocabulary: int) -> list[int]:
    """The tokens of a prompt, checked.

    Raises:
        InvalidInput: they are none of a model with so many tokens.
    """
    if not isinstance(prompt, Iterable) or isinstance(prompt, str | bytes | Mapping):
        raise InvalidInput(f"the prompt is {str(prompt)[:40]!r}, of type {type(prompt).__name__}; must be a list of token ids")
    tokens = []
    for token in prompt:
        if not _is_whole(token) or not 0 <= operator.index(token) < vocabulary:
            raise InvalidInput(f"the prompt has {repr(token)[:40]} for a token; the model has 0 to {vocabulary - 1}")
        tokens.append(operator.index(token))
    if not tokens:
        raise InvalidInput("the prompt has no token; it must have at least one")
    return tokens


def _is_whole(value: Any) -> bool:
    """Whether it is a whole number, of whatever library."""
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
