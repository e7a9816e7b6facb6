"""`TextReader`: texts, and pairs of texts, as the tokens that an embedding model reads. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rooftile.engine.embedding.folder import Recipe
from rooftile.engine.text.prompt import check_tokens
from rooftile.engine.text.tokenizer import MOST_BYTES, Tokenizer
from rooftile.errors import InvalidInput


class ReadText(NamedTuple):
    """A text, or a pair of texts, in tokens."""

    tokens: list[int]
    types: list[int] | None = None
    """The type of each token, of a pair; None for type 0."""


class TextReader:
    """Reads texts as the recipe says, and refuses those that are too long.

    Args:
        tokenizer: the model's tokenizer, or None.
        recipe: prompts and the like.
        max_len: the longest text in tokens.
        vocabulary: the model has tokens 0 to vocabulary - 1.
        most_bytes: the longest text that is accepted, in bytes of UTF-8.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, recipe: Recipe, max_len: int, vocabulary: int, most_bytes: int = MOST_BYTES
    ) -> None:  # fmt: skip
        self._tokenizer, self.recipe, self.max_len, self._vocabulary = tokenizer, recipe, max_len, vocabulary
        self._most_bytes = most_bytes

    def read(self, texts: Sequence[Any], *, prompt_name: str | None = None, cut: int | None = None) -> list[ReadText]:
        """Returns the tokens of texts, behind their prompt.

        Args:
            texts: texts, or token ids, which are read as they are.
            prompt_name: the name of a prompt in the folder.
            cut: a longer text loses its end, so that it has this number of tokens, special ones included; -1 is the longest.

        Raises:
            InvalidInput: a text cannot be read, or is too long.
        """
        limit, prompt = self.limit(cut), self.recipe.prompt(prompt_name)
        lower = self.recipe.lower
        whole = [prompt + text for text in texts if isinstance(text, str)]
        whole = [text.lower() for text in whole] if lower else whole
        # together: the tokenizer has several threads
        encoded = iter(zip(whole, self._own.encode_many(whole, most_bytes=self._most_bytes), strict=True)) if whole else iter(())
        return [
            ReadText(self._encoded(*next(encoded), limit) if isinstance(text, str) else self._given(text, limit, prompt_name))
            for text in texts
        ]

    def _given(self, ids: Any, limit: int | None, prompt_name: str | None) -> list[int]:
        if prompt_name is not None:
            raise InvalidInput("prompt_name is given and a text is token ids, before which no prompt is put; give its text")
        return self._checked(check_tokens(ids, self._vocabulary)[:limit])

    def _encoded(self, text: str, tokens: list[int], limit: int | None) -> list[int]:
        if limit is not None and len(tokens) > limit:
            tokens = self._own.encode_cut(text, limit)
        if not tokens:
            raise InvalidInput("the text has no token; it must have at least one")
        return self._checked(tokens)

    def pair(self, first: str, second: str, *, cut: int | None = None) -> ReadText:
        """Returns the tokens of two texts that a cross-encoder reads together; `cut` takes them from the longer one's end.

        Raises:
            InvalidInput: a text cannot be read, or both are too long.
        """
        for text in (first, second):
            if not isinstance(text, str):
                raise InvalidInput("a cross-encoder reads pairs of texts; must be strings, and not token ids")
        lower = self.recipe.lower
        first, second = (first.lower(), second.lower()) if lower else (first, second)
        tokens, types = self._own.encode_pair(first, second, self.limit(cut), most_bytes=self._most_bytes)
        return ReadText(self._checked(tokens), types if self.recipe.pair_types else None)

    def limit(self, cut: int | None) -> int | None:
        """Returns to how many tokens a text is cut; None for not at all.

        Raises:
            InvalidInput: `truncate_prompt_tokens` is no such number.
        """
        if cut is None:
            return None
        if not isinstance(cut, int) or isinstance(cut, bool) or (cut < 1 and cut != -1) or cut > self.max_len:
            raise InvalidInput(
                f"truncate_prompt_tokens is {cut!r}; must be from 1 to {self.max_len:,}, or -1 for the longest text"
            )
        return self.max_len if cut == -1 else cut

    @property
    def _own(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidInput("the model has no tokenizer; give token ids")
        return self._tokenizer

    def _checked(self, tokens: list[int]) -> list[int]:
        if len(tokens) > self.max_len:
            raise InvalidInput(
                f"a text has {len(tokens):,} tokens, and the model reads {self.max_len:,}: give a shorter one, or "
                "truncate_prompt_tokens=-1 to cut it"
            )
        return tokens


def not_finite(place: int) -> str:
    """Returns the sentence for a vector with nan or infinity in it."""
    return (
        f"the vector of text {place} has nan or infinity: the model's weights have, or its numbers are too large for its dtype; "
        'try dtype="fp32"'
    )
