"""`LongTokens`: the tokens that may complete a text and go on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Set
from itertools import count, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rooftile.engine.text.tokenizer import Tokenizer


class LongTokens:
    """The tokens of a vocabulary that have one of some characters, and others behind it.

    Args:
        tokenizer: the model's tokenizer.
        vocabulary: the number of the model's logits.
        characters: the last characters of the texts that may be completed, printable ones of ASCII: every vocabulary spells
            these as they are.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, characters: Set[str]) -> None:
        ids = range(min(vocabulary, tokenizer.vocab_size))
        long = [id for id in ids if not characters.isdisjoint(tokenizer.token(id)[:-1])] if characters else []
        self._tokens = sorted((tokenizer.text_of(id), id) for id in long if not tokenizer.is_added(id))

    def behind(self, text: str) -> list[tuple[str, int]]:
        """Returns the tokens that begin with a text and go on, each with what it goes on with."""
        first = bisect_left(self._tokens, (text, 0))
        places = takewhile(lambda n: n < len(self._tokens) and self._tokens[n][0].startswith(text), count(first))
        found = [self._tokens[place] for place in places]
        return [(written[len(text) :], id) for written, id in found if len(written) > len(text)]
