"""Finds how many tokens of an answer come before a character of its text, exactly, where tokens were decoded together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from rooftile.engine.text.incremental_decoder import IncrementalDecoder
from rooftile.engine.text.tokenizer import Tokenizer

# tokens before a group that decide how it is decoded: a few, and a run of tokens of one byte
BEFORE = 64


def tokens_before(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], begins: Sequence[int], place: int, *, skip_special: bool
) -> int:
    """Returns how many tokens begin before a place in the text.

    Tokens that were decoded together share one place (see `IncrementalDecoder`): those of one such group are decoded again, one
    by one.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the tokens before the answer.
        ids: the answer's tokens.
        begins: where they begin, as far as they are decoded.
        place: characters of the answer's text.
        skip_special: whether special tokens have no text.
    """
    count = bisect_left(begins, place)
    first = bisect_left(begins, begins[count - 1]) if count else 0
    if count - first < 2:
        return count
    decoder = IncrementalDecoder(tokenizer, skip_special, [*prompt[-BEFORE:], *ids[max(0, first - BEFORE) : first]])
    for id in ids[first:count]:
        decoder.add(id)
    # a run of bytes has its places when it ends
    decoder.finish()
    return first + bisect_left(decoder.begins, place - begins[first])
