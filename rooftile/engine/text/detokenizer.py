"""Turns tokens into text, and finds the stop string that ends an answer.

Without stop strings the text of a token is not needed before a caller reads it: tokens are kept, and decoded together when text
is read (`incremental_decoder.py`). With stop strings each token is decoded when it comes.

The decoded text is then searched for the stop strings (`stops.py`). Text that may still become a stop string is held back, and
all other text is released at once. A stop string that is spelt with a special token is searched in the text with all special
tokens in it, also where they are left out of the text that is returned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text.growing import GrowingText, TextSnapshot
from rooftile.engine.text.incremental_decoder import IncrementalDecoder
from rooftile.engine.text.stops import Hidden, StopString
from rooftile.engine.text.tokenizer import Tokenizer


class Detokenizer:
    """Builds the text of one answer from its tokens.

    The stop string that is complete first ends the answer; if several are complete at the same character, the longest is taken.
    A stop string that is complete within the first min_tokens tokens is text like any other. With include_stop the text ends with
    the stop string, special tokens in it included.

    Args:
        tokenizer: the checkpoint's tokenizer.
        params: stop, include_stop, min_tokens, skip_special_tokens and shown_special_tokens are used.
        prompt: the tokens that the answer continues; the text is what they add to the prompt's.

    Example:
        >>> text = Detokenizer(tokenizer, SamplingParams(stop="."))                       # doctest: +SKIP
        >>> text.add(tokenizer.encode("One. Two."))                                       # doctest: +SKIP
        >>> text.stopped, text.text                                                       # doctest: +SKIP
        ('.', 'One')
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self.stopped: str | None = None
        if params.skip_special_tokens and params.shown_special_tokens:
            tokenizer = tokenizer.showing(params.shown_special_tokens)
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, params.skip_special_tokens, prompt)
        self._stops = [StopString(stop, tokenizer.spells_special(stop)) for stop in params.stops]
        self._sees_special = any(stop.spells_special for stop in self._stops)
        self._hides_special = self._sees_special and params.skip_special_tokens
        self._hidden = Hidden()
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
        """Returns the tokens that are not read yet, for a detokenizer elsewhere: this one forgets them."""
        assert not self._stops, "stop strings are found in text"
        ids, self._kept = self._kept, []
        return ids

    @property
    def tokens_released(self) -> int:
        """How many tokens begin within the final text so far; the text of the others is held back."""
        self._decode()
        return bisect_left(self._decoder.begins, self._length - len(self._held))

    @property
    def begins(self) -> list[int]:
        """How many characters come before the text of each token that is decoded (see `IncrementalDecoder`)."""
        return self._decoder.begins

    @property
    def length(self) -> int:
        """How many characters are decoded, final or not."""
        return self._length

    @property
    def tokens_kept(self) -> int:
        """How many tokens belong to the text: all of them, or after a stop string those that begin before its end."""
        begins = self._decoder.begins
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
            self._release(self._decoder.add(id))
            if self._hides_special and self._tokenizer.is_special(id):
                # text that waits comes before it, but for a character that it tears apart
                self._pass(id, self._decoder.flush())

    def add_end(self, id: int) -> None:
        """Takes the token that ends the answer. It has no text, unless it spells a stop string that is to be shown."""
        if self._sees_special and self._include_stop and self.stopped is None and self._tokenizer.is_special(id):
            self._decoder.count_silent()
            self._pass(id, self._decoder.finish())

    def finish(self) -> None:
        """Ends the answer and releases the text that was held back, in which a stop string may still be found."""
        self._finished = True
        if self._stops:
            self._decode()

    def _decode(self) -> None:
        """Brings the text up to date."""
        if self._kept:
            kept, self._kept = self._kept, []
            self._release(self._decoder.add_all(kept))
        if self._finished and not self._complete:
            self._complete = True
            if self.stopped is None:
                self._release(self._decoder.finish())
            if self.stopped is None:
                self._released.append(self._held)
                self._held = ""

    def _pass(self, id: int, before: str) -> None:
        """Shows text, and a special token behind it, to the stop strings that are spelt with one."""
        self._release(before)
        if self.stopped is None:
            self._release(self._tokenizer.token(id), hidden=True)

    def _release(self, piece: str, *, hidden: bool = False) -> None:
        """Searches a piece of text for stop strings, and releases what is now final; a hidden piece is not in the text."""
        if not piece:
            return
        if not self._stops:
            self._length += len(piece)
            self._released.append(piece)
            return
        begins = self._decoder.begins
        # a stop string may end after this many characters at the earliest: its last one belongs to a token past min_tokens
        least = (begins[self._min_tokens] + 1 - self._length) if self._min_tokens < len(begins) else len(piece) + 1
        stops = [stop for stop in self._stops if stop.spells_special] if hidden else self._stops
        ends = [(end, stop) for stop in stops if (end := stop.find(piece, least)) is not None]
        if ends:
            self._stop(piece, min(ends, key=lambda found: (found[0], -len(found[1].text))), hidden)
            return
        self._take(piece, hidden)
        held = max([stop.matched for stop in self._stops])
        if held and self._hides_special:
            held = max(self._hidden.visible(stop, stop.matched, self._length) for stop in self._stops)
        text = self._held
        self._held = text[len(text) - held :] if held else ""
        self._released.append(text[: len(text) - held])

    def _take(self, piece: str, hidden: bool) -> None:
        if hidden:
            self._hidden.add(self._length, piece)
        else:
            self._length += len(piece)
            self._held += piece

    def _stop(self, piece: str, found: tuple[int, StopString], hidden: bool) -> None:
        """Ends the answer at the stop string that is complete after a number of characters of a piece."""
        end, stop = found
        self._take(piece[:end], hidden)
        self.stopped = stop.text
        cut = self._hidden.visible(stop, len(stop.text), self._length)
        text = self._held[: len(self._held) - cut] + (stop.text if self._include_stop else "")
        self._length += len(text) - len(self._held)
        self._held = ""
        self._released.append(text)
