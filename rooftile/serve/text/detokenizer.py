"""Turns tokens into text, and finds the stop string that ends an answer.

Without stop strings nobody needs the text of a token before somebody reads it: tokens are kept, and decoded together when text is
read (`pieces.py`). With stop strings each token is decoded when it comes.

The decoded text is then searched for the stop strings. Each is matched with its table of borders (Knuth, Morris and Pratt, 1977):
text that may still become a stop string is held back, no character is looked at twice, and all other text is released at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from rooftile.serve.sampling.params import SamplingParams
from rooftile.serve.text.growing import GrowingText, TextSnapshot
from rooftile.serve.text.pieces import Pieces
from rooftile.serve.text.tokenizer import Tokenizer


class Detokenizer:
    """Builds the text of one answer from its tokens.

    The stop string that is complete first ends the answer; if several are complete at the same character, the longest is taken.
    A stop string that is complete within the first min_tokens tokens is text like any other.

    Args:
        tokenizer: the checkpoint's tokenizer.
        params: stop, include_stop, min_tokens and skip_special_tokens are used.

    Example:
        >>> text = Detokenizer(tokenizer, SamplingParams(stop="."))                       # doctest: +SKIP
        >>> text.add(tokenizer.encode("One. Two."))                                       # doctest: +SKIP
        >>> text.stopped, text.text                                                       # doctest: +SKIP
        ('.', 'One')
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stopped: str | None = None
        self._pieces = Pieces(tokenizer, params.skip_special_tokens)
        self._stops = [_Stop(stop) for stop in params.stops]
        self._include_stop = params.include_stop
        self._min_tokens = params.min_tokens
        self._released = GrowingText()
        # tokens that are not decoded yet
        self._kept: list[int] = []
        # decoded, but held back: it may become a stop string
        self._held = ""
        # characters of both together
        self._length = 0
        self._finished = False
        self._complete = False

    @property
    def text(self) -> str:
        """The final text so far."""
        return self.snapshot().read()

    def snapshot(self) -> TextSnapshot:
        """Returns the final text so far without copying it."""
        self._decode()
        return self._released.snapshot()

    def follow(self) -> None:
        """Lets `take` return only what is new."""
        self._decode()
        self._released.follow()

    def take(self) -> str:
        """Returns the final text since the last call; without `follow`, the first call returns all of it."""
        self._decode()
        return self._released.take()

    def take_ids(self) -> list[int]:
        """Returns the tokens that nobody has read, for a detokenizer elsewhere: this one forgets them."""
        assert not self._stops, "stop strings are found in text"
        ids, self._kept = self._kept, []
        return ids

    @property
    def tokens_released(self) -> int:
        """How many tokens begin within the final text so far; the text of the others is held back."""
        self._decode()
        return bisect_left(self._pieces.begins, self._length - len(self._held))

    @property
    def tokens_kept(self) -> int:
        """How many tokens belong to the text: all of them, or after a stop string those that begin before its end."""
        begins = self._pieces.begins
        return len(begins) + len(self._kept) if self.stopped is None else bisect_left(begins, self._length)

    def add(self, ids: Sequence[int]) -> None:
        """Takes the next tokens. Tokens after a stop string are dropped."""
        assert not self._finished or self.stopped is not None, "an answer that is finished takes no more tokens"
        if not self._stops:
            self._kept += ids
            return
        for id in ids:
            if self.stopped is not None:
                break
            self._release(self._pieces.add(id))

    def finish(self) -> None:
        """Ends the answer and releases the text that was held back, in which a stop string may still be found."""
        self._finished = True
        if self._stops:
            self._decode()

    def _decode(self) -> None:
        """Brings the text up to date."""
        if self._kept:
            kept, self._kept = self._kept, []
            self._release(self._pieces.add_all(kept))
        if self._finished and not self._complete:
            self._complete = True
            if self.stopped is None:
                self._release(self._pieces.finish())
            if self.stopped is None:
                self._released.append(self._held)
                self._held = ""

    def _release(self, piece: str) -> None:
        """Searches a piece of text for stop strings, and releases what is now final."""
        if not piece:
            return
        if not self._stops:
            self._length += len(piece)
            self._released.append(piece)
            return
        begins = self._pieces.begins
        # a stop string may end after this many characters at the earliest: its last one belongs to a token past min_tokens
        least = begins[self._min_tokens] + 1 if self._min_tokens < len(begins) else self._length + len(piece) + 1
        ends = [(end, stop) for stop in self._stops if (end := stop.find(piece, least - self._length)) is not None]
        text = self._held + piece
        if ends:
            end, stop = min(ends, key=lambda found: (found[0], -len(found[1].text)))
            self.stopped = stop.text
            kept = len(self._held) + end - (0 if self._include_stop else len(stop.text))
            self._length += kept - len(self._held)
            text, self._held = text[:kept], ""
        else:
            self._length += len(piece)
            held = max(stop.matched for stop in self._stops)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        self._released.append(text)


class _Stop:
    """A stop string, and how many of its characters the text so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # borders[n]: the length of the longest proper prefix of text[:n] that is also its suffix
        self._borders = [0, 0]
        for character in text[1:]:
            border = self._borders[-1]
            while border and text[border] != character:
                border = self._borders[border]
            self._borders.append(border + (text[border] == character))

    def find(self, piece: str, least: int) -> int | None:
        """Reads a piece of text; returns how many of its characters there are up to the stop string's end, at least `least`."""
        if not self.matched and self.text[0] not in piece:
            return None
        for i, character in enumerate(piece):
            while self.matched and self.text[self.matched] != character:
                self.matched = self._borders[self.matched]
            self.matched += self.text[self.matched] == character
            if self.matched == len(self.text):
                if i + 1 >= least:
                    return i + 1
                self.matched = self._borders[self.matched]
        return None
