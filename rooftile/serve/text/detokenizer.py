"""Turns tokens into text while they arrive, and finds the stop string that ends an answer.

The text of a token depends on its neighbours: the first token loses its leading space, and the bytes of several tokens can make
one character. So a few tokens are decoded together, in a window that moves along:

    text(1 .. n+1) = text(1 .. n) + (decode(window + token n+1) without its beginning, decode(window))

Only the window is decoded again, at most 2 SPAN tokens, so a token costs the same however long the answer is. The difference is
right for these reasons:

- What happens at the beginning of a text (a space removed, a "##" kept) happens to the window's first token in both decodes.
- A character has at most 4 bytes. For an incomplete one decode writes one U+FFFD at the very end, which is held back. SPAN tokens
  have at least 4 bytes, so every window contains a leading byte, from which on UTF-8 is decoded alike.
- Tokens of one byte each (byte fallback) are decoded as a run: if the run is not valid UTF-8, each of its bytes becomes a U+FFFD,
  even those that formed a character before. So a run is held back until another token ends it: no window ends inside a run.
- Tokens that decode skips (special tokens) never enter a window.
- A checkpoint that removes spaces before punctuation changes at most the last 8 characters: these are held back, and the window
  is longer.

The decoded text is then searched for the stop strings. Each is matched with its table of borders (Knuth, Morris and Pratt, 1977):
text that may still become a stop string is held back, no character is looked at twice, and all other text is released at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from rooftile.serve.sampling.params import SamplingParams
from rooftile.serve.text.growing import GrowingText, TextSnapshot
from rooftile.serve.text.tokenizer import Tokenizer

SPAN = 4
SPAN_CLEANED = 32
HELD_CLEANED = 8


class Detokenizer:
    """Builds the text of one answer, token by token.

    The stop string that is complete first ends the answer; if several are complete at the same character, the longest is taken.
    A stop string that is complete within the first min_tokens tokens is text like any other.

    Args:
        tokenizer: the checkpoint's tokenizer.
        params: stop, include_stop, min_tokens and skip_special_tokens are used.

    Example:
        >>> text = Detokenizer(tokenizer, SamplingParams(stop="."))                       # doctest: +SKIP
        >>> text.add(tokenizer.encode("One. Two.")), text.stopped, text.text              # doctest: +SKIP
        ('One', '.', 'One')
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stopped: str | None = None
        self._pieces = _Pieces(tokenizer, params.skip_special_tokens)
        self._stops = [_Stop(stop) for stop in params.stops]
        self._include_stop = params.include_stop
        self._min_tokens = params.min_tokens
        self._released = GrowingText()
        # decoded, but held back: it may become a stop string
        self._held = ""
        # characters of both together
        self._length = 0
        self._finished = False

    @property
    def text(self) -> str:
        """The final text so far."""
        return self.snapshot().read()

    def snapshot(self) -> TextSnapshot:
        """Returns the final text so far without copying it."""
        return self._released.snapshot()

    def follow(self) -> None:
        """Lets `take` return only what is new."""
        self._released.follow()

    def take(self) -> str:
        """Returns the final text since the last call; without `follow`, the first call returns all of it."""
        return self._released.take()

    @property
    def tokens_released(self) -> int:
        """How many tokens begin within the final text so far; the text of the others is held back."""
        return bisect_left(self._pieces.begins, self._length - len(self._held))

    @property
    def tokens_kept(self) -> int:
        """How many tokens belong to the text: all of them, or after a stop string those that begin before its end."""
        begins = self._pieces.begins
        return len(begins) if self.stopped is None else bisect_left(begins, self._length)

    def add(self, ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that they make final. Tokens after a stop string are dropped."""
        assert not self._finished or self.stopped is not None, "an answer that is finished takes no more tokens"
        new = ""
        for id in ids:
            if self.stopped is not None:
                break
            new += self._release(self._pieces.add(id))
        return new

    def finish(self) -> str:
        """Ends the answer; returns the text that was held back, in which a stop string may still be found."""
        new = ""
        if not self._finished and self.stopped is None:
            new = self._release(self._pieces.finish())
            if self.stopped is None:
                self._released.append(self._held)
                new, self._held = new + self._held, ""
        self._finished = True
        return new

    def _release(self, piece: str) -> str:
        """Searches a piece of text for stop strings; returns the text that is now final."""
        if not piece:
            return ""
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
            held = max((stop.matched for stop in self._stops), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        self._released.append(text)
        return text


class _Pieces:
    """Decodes an answer into final pieces of text; it knows nothing of stop strings.

    `begins` has, for each token, how many characters come before its text. A token that follows half a character begins with
    that character, whether it completes it or not.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self.begins: list[int] = []
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._span, self._margin = (SPAN_CLEANED, HELD_CLEANED) if tokenizer.cleans_up else (SPAN, 0)
        self._window: list[int] = []
        # characters of the window's text that were returned, and that are decoded
        self._shown = 0
        self._decoded = 0
        # characters of the whole decoded text
        self._length = 0
        # the run of byte tokens at the end: ids with their bytes, None for a token without text among them
        self._run: list[tuple[int, int | None]] = []

    def add(self, id: int) -> str:
        """Takes a token; returns the text that it makes final."""
        if self._tokenizer.is_silent(id, self._skip_special):
            if self._run:
                self._run.append((id, None))
            self._begin()
            return ""
        byte = self._tokenizer.byte_ids.get(id)
        if byte is not None:
            self._run.append((id, byte))
            self._begin()
            return ""
        if not self._run:
            self._begin()
            return self._read([id], self._margin)
        # the token ends the run; the run is decoded before the token enters the window
        before = self._read_run(self._margin)
        self._begin()
        return before + self._read([id], self._margin)

    def _begin(self) -> None:
        # removing spaces before punctuation may shorten the text below where the previous token began
        self.begins.append(max(self._length, self.begins[-1] if self.begins else 0))

    def finish(self) -> str:
        """Returns the rest: a run of byte tokens, or half a character."""
        before = self._read_run(0) if self._run else ""
        return before + self._read([], 0, ended=True)

    def _read_run(self, margin: int) -> str:
        ids = [id for id, byte in self._run if byte is not None]
        start, first = self._length, len(self.begins) - len(self._run)
        piece = self._read(ids, margin, ended=True)
        spans = _spans(bytes(byte for _, byte in self._run if byte is not None))
        # decode removes one space at the beginning of an answer
        lost = sum(1 for span in spans if span) - (self._length - start)
        # characters that are complete before each byte; a token without text begins where the next byte does
        before = [0, *accumulate(spans)]
        place = 0
        for i, (_, byte) in enumerate(self._run):
            self.begins[first + i] = start + max(0, before[place] - lost)
            place += byte is not None
        self._run = []
        return piece

    def _read(self, ids: list[int], margin: int, *, ended: bool = False) -> str:
        """Adds tokens to the window and decodes it; returns the new text."""
        decode = self._tokenizer.decode
        self._window += ids
        text = decode(self._window, self._skip_special)
        half = not ended and text.endswith("\ufffd")
        whole = len(text) - half
        self._length += whole - self._decoded
        final = max(self._shown, whole - margin)
        piece, self._shown, self._decoded = text[self._shown : final], final, whole
        # after a run the window does not move yet: the token that ended the run is still to be added
        if not ended and len(self._window) >= 2 * self._span:
            self._window = self._window[self._start() :]
            cut = len(decode(self._window, self._skip_special)) - len(text)
            self._shown += cut
            self._decoded += cut
        return piece

    def _start(self) -> int:
        """Returns the window's next first token: SPAN tokens from its end, or before a run whose text may be held back."""
        start = len(self._window) - self._span
        while self._margin and start and self._window[start - 1] in self._tokenizer.byte_ids:
            start -= 1
        return start


def _spans(run: bytes) -> list[int]:
    """Returns 1 for each byte that completes a character, else 0; in a run that is not valid UTF-8 each byte is a character."""
    try:
        run.decode()
    except UnicodeDecodeError:
        return [1] * len(run)
    # a character is complete before a byte that does not continue it, and at the end
    return [int(i + 1 == len(run) or run[i + 1] & 0xC0 != 0x80) for i in range(len(run))]


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
