"""Texts that repeat their prompt, for look-up: an edit of code, and a summary of sentences taken from a text.

They are made of this package's own source, by rules that a reader can repeat: in the edit one name is another one everywhere, and
the summary is the first sentence of each paragraph. A token is a word, a run of blanks, or a mark.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import NamedTuple

import rooftile
from rooftile.engine.sampling import params
from rooftile.engine.speculation.ngrams import NgramIndex


class LookupText(NamedTuple):
    """A prompt and its answer, in tokens."""

    prompt: list[int]
    answer: list[int]


def edit() -> LookupText:
    """The module of sampling parameters, and its copy in which `temperature` is called `heat`."""
    source = inspect.getsource(params)
    return _numbered(source, re.sub(r"\btemperature\b", "heat", source))


def summary() -> LookupText:
    """The docstrings of the package's public names, and the first sentence of each paragraph that has several."""
    strings = [inspect.getdoc(getattr(rooftile, name)) or "" for name in sorted(rooftile.__all__)]
    paragraphs = [" ".join(part.split()) for text in strings for part in text.split("\n\n")]
    sentences = [found for part in paragraphs if len(found := re.split(r"(?<=\.) (?=[A-Z])", part)) > 1]
    return _numbered("\n\n".join(map(" ".join, sentences)), "\n".join(found[0] for found in sentences))


TEXTS = {"edit": edit, "summary": summary}


def _numbered(*texts: str) -> LookupText:
    numbers: dict[str, int] = {}
    return LookupText(*([numbers.setdefault(word, len(numbers)) for word in re.findall(r"\w+|\s+|.", text)] for text in texts))


class TextGuesser:
    """Guesses of a look-up in a text, told as right or wrong; see `rooftile.engine.speculation.ngrams.Guesser`.

    The sequence that it is given has as many tokens as the text, and says by its length alone how far the answer has come.
    """

    text: LookupText
    given: int  # tokens of the prompt in the sequence
    right, wrong = 0, 1

    def __init__(self, shortest: int, longest: int) -> None:
        self._index = NgramIndex(shortest, longest)

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        done = len(ids) - self.given
        found = self._index.guess([*self.text.prompt, *self.text.answer[:done]], count)
        due = self.text.answer[done:]
        return [self.right if guess == token else self.wrong for guess, token in zip(found, due, strict=False)]
