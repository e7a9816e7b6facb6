"""`Speculation`: what `LLM(speculative=...)` asks for. Nothing here imports torch, so a command refuses a wrong value at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.arguments import python_number

# the most tokens of a draft: with its row before them they fill a captured graph
MOST_TOKENS = 31
LONGEST_GRAM = 8
SHORTEST = 2
# the most tokens of a draft, where nothing is said
USUAL = {"lookup": 15, "draft": 8, "eagle3": 5, "mtp": 3}
METHODS = tuple(USUAL)
# methods that name no model: one looks tokens up, and one has its layer in the checkpoint
ALONE = ("lookup", "mtp")
# vLLM's words for these
SAME = {
    "ngram": "lookup", "draft_model": "draft", "deepseek_mtp": "mtp", "glm4_moe_mtp": "mtp", "glm4_moe_lite_mtp": "mtp",
    "mimo_mtp": "mtp",
}  # fmt: skip
LATER = {
    name: f'speculative has the method "{name}"; has "lookup", "draft", "eagle3" and "mtp" only' for name in ("eagle", "medusa")
}
# vLLM's words for the same
RENAMED = {
    "num_speculative_tokens": "tokens", "prompt_lookup_max": "longest", "prompt_lookup_min": "shortest",
    "disable_by_batch_size": "max_batch",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding, as it is asked for.

    Args:
        method: "lookup" guesses that the text goes on as it did where its last tokens occurred before, in prompt or answer;
            "draft" has a smaller model guess, "eagle3" a head of EAGLE-3, which reads the model's hidden states, and "mtp" the
            checkpoint's own layer of multi-token prediction.
        model: the smaller model, or the head: a folder or a name on the Hub; of a model also a decoder, or a configuration, whose
            weights are random.
        tokens: the most tokens of a draft.
        longest, shortest: the numbers of last tokens that are looked for, the longest first.
        max_batch: drafts are made while at most this many answers run; None where they pay, as predicted.
    """

    method: str = "lookup"
    model: Any = None
    tokens: int = USUAL["lookup"]
    longest: int = 4
    shortest: int = SHORTEST
    max_batch: int | None = None

    @classmethod
    def of(cls, given: object) -> Speculation | None:
        """Reads the setting: None, a method's name, a dictionary, or such a dictionary as JSON.

        Raises:
            InvalidInput: it is none of these, or a value makes no sense.
            Unsupported: it names a method that is missing here.

        Example:
            >>> Speculation.of({"method": "lookup", "tokens": 7}).tokens
            7
        """
        if given is None:
            return None
        if isinstance(given, str):
            given = _read(given)
        if not isinstance(given, Mapping):
            raise InvalidInput(f'speculative is {repr(given)[:60]}; must be "lookup", a dictionary with a method, or None')
        asked: dict[str, Any] = {RENAMED.get(str(name), str(name)): python_number(value) for name, value in given.items()}
        method = asked.get("method", "lookup" if asked.get("model") is None else "draft")
        method = SAME.get(method, method) if isinstance(method, str) else method
        if isinstance(method, str) and method in LATER:
            raise Unsupported(LATER[method])
        if not isinstance(method, str) or method not in METHODS:
            raise InvalidInput(f'speculative has the method {method!r}; must be "lookup", "draft", "eagle3" or "mtp"')
        foreign = [name for name in asked if name not in cls.__dataclass_fields__]
        if foreign:
            raise InvalidInput(f"speculative has {foreign[0]!r}; may have {', '.join(cls.__dataclass_fields__)}")
        for name, least, most in (
            ("tokens", 1, MOST_TOKENS), ("longest", 1, LONGEST_GRAM), ("shortest", 1, LONGEST_GRAM), ("max_batch", 1, 1 << 16),
        ):  # fmt: skip
            value = asked.get(name)
            if name in asked and not (name == "max_batch" and value is None) and not _is_between(value, least, most):
                raise InvalidInput(f"speculative has {name} = {value!r}; must be a whole number from {least} to {most:,}")
        asked["method"] = method
        asked.setdefault("tokens", USUAL[method])
        _check_model(asked)
        if "longest" in asked and "shortest" not in asked:
            asked["shortest"] = min(SHORTEST, asked["longest"])
        found = cls(**asked)
        if found.shortest > found.longest:
            raise InvalidInput(f"speculative has shortest = {found.shortest} and longest = {found.longest}; it must not be more")
        return found


def _check_model(asked: Mapping[str, Any]) -> None:
    """Refuses a method without its model, and settings of another method."""
    model, method = asked.get("model"), asked["method"]
    if method not in ALONE and (model is None or isinstance(model, int | float | bytes | list | dict) or model == ""):
        raise InvalidInput(
            f"speculative has the method '{method}' and the model {model!r}; must be a folder, or a name on the Hub"
        )
    if method in ALONE and model is not None:
        raise InvalidInput(
            f'speculative has a model, {str(model)[:60]}, and the method "{method}", which needs none: leave one out'
        )
    for name in ("longest", "shortest"):
        if method != "lookup" and name in asked:
            raise InvalidInput(
                f"speculative has {name} = {asked[name]} and the method '{method}', which looks nothing up: leave it out"
            )


def check_speculative(name: str, value: object) -> None:
    """Raises InvalidInput or Unsupported unless `value` is a setting that `Speculation.of` reads."""
    Speculation.of(value)


def check_alone(given: Mapping[str, Any]) -> None:
    """Refuses settings of an engine that do not go with speculation.

    Raises:
        Unsupported: they do not go together.
    """
    if given.get("speculative") is None:
        return
    for name in ("tensor_parallel_size", "context_parallel_size"):
        if given.get(name, 1) > 1:
            raise Unsupported(f"speculative is given and {name} is {given[name]}; drafts are checked on one GPU: leave one out")
    if given.get("approximate") is not None:
        raise Unsupported("speculative and approximate are both given; drafts are checked by exact attention: leave one out")


def _read(text: str) -> object:
    """Returns the dictionary that a text stands for."""
    if not text.lstrip().startswith("{"):
        return {"method": text}
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidInput(f"speculative is {text[:60]!r}, which is no JSON; write a method's name or a dictionary") from None


def _is_between(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
