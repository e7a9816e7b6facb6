"""Reads the texts of a form; whatever is wrong is refused with the name of its field."""

from __future__ import annotations

from typing import Any

from rooftile.server import limits
from rooftile.server.refusals import Refusal


def list_inputs(given: Any) -> list[str | list[int]]:
    """Returns the texts of `input`: a text, texts, token ids, or lists of them.

    Raises:
        Refusal: it is none of these, or too much.
    """
    several = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    _check_count("input", several)
    for each in several:
        is_ids = isinstance(each, list) and bool(each) and set(map(type, each)) == {int}
        if not (isinstance(each, str) or is_ids):
            raise _bad("input", "input must be a text, a list of texts, a list of token ids, or a list of such lists")
    return several


def list_texts(name: str, given: Any) -> list[str]:
    """Returns the texts of a field that holds one or a list.

    Raises:
        Refusal: it is neither, or too much.
    """
    several = [given] if isinstance(given, str) else given
    if not isinstance(several, list) or not several or not all(isinstance(each, str) for each in several):
        raise _bad(name, f"{name} must be a text, or a list of texts")
    _check_count(name, several)
    return several


def list_documents(given: Any) -> list[str]:
    """Returns the texts of `documents`, each a text or an object with one.

    Raises:
        Refusal: they are not such a list, or too many.
    """
    if not isinstance(given, list) or not given:
        raise _bad("documents", "documents must be a list of texts, or of objects with a text each")
    _check_count("documents", given)
    found: list[Any] = [each["text"] if isinstance(each, dict) and set(each) == {"text"} else each for each in given]
    if not all(isinstance(each, str) for each in found):
        raise _bad("documents", "documents must be a list of texts, or of objects with a text each")
    return found


def _check_count(name: str, given: list[Any]) -> None:
    if len(given) > limits.TEXTS:
        raise _bad(name, f"{name} has {len(given):,} texts; may have at most {limits.TEXTS:,}: send several requests")


def _bad(param: str, message: str) -> Refusal:
    return Refusal("invalid_value", message, param=param)
