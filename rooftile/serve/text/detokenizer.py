"""The text of an answer while its tokens come, and the stop that ends it.

What a token's text is depends on its neighbours: the first loses its leading space, bytes of several make one
character. So text comes from decoding a few tokens together, in a window that moves along:

    text(1 .. n+1) = text(1 .. n) + what decode(window + token n+1) has more than decode(window)

Nothing of an answer is decoded again but the window, at most twice SPAN tokens, so that a token costs the same however
long the answer is. The difference is right because

- what happens at the beginning (a space taken away, a "##" kept) happens to the window's first token, in both decodes;
- a character is at most 4 bytes, and so is what an incomplete one leaves to be read: decode writes one U+FFFD for it,
  at the very end, which is held back. SPAN tokens have 4 bytes at least, and UTF-8 is read alike from its next leading byte;
- tokens of one byte each (byte fallback) are read as a run: if that is no UTF-8, each of its bytes becomes a U+FFFD,
  also those that were a character before. So a run is held back until another token ends it, and a window ends after one;
- tokens that decode passes over (special ones that are skipped) never come into a window;
- a checkpoint that has spaces before punctuation taken out changes text at most 8 characters behind its end:
  so many are held back, and a window has more tokens.

That text then goes by the stops. Each is matched with its table of borders (Knuth, Morris and Pratt, 1977): what could
still become a stop is held back, no character is looked at twice, and nothing else waits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from rooftile.serve.sampling.params import SamplingParams
from rooftile.serve.text.tokenizer import Tokenizer

SPAN = 4
SPAN_CLEANED = 32
HELD_CLEANED = 8


class Detokenizer:
    """The text of one answer, token by token.

    Args:
        tokenizer: of the checkpoint.
        params: stop, include_stop, min_tokens and skip_special_tokens are used.

    A stop ends the answer where it is complete first, and of those that end together the longest is taken. One that is
    complete within the first min_tokens tokens is text like any other.

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
        # given out; decoded and held back, as it may begin a stop; characters of both
        self._released: list[str] = []
        self._waiting = ""
        self._length = 0
        self._finished = False

    @property
    def text(self) -> str:
        """The text so far that is final."""
        self._released = ["".join(self._released)]
        return self._released[0]

    @property
    def tokens_kept(self) -> int:
        """How many tokens belong to the text: after a stop those that begin before its end, and else all."""
        begins = self._pieces.begins
        return len(begins) if self.stopped is None else bisect_left(begins, self._length)

    def add(self, ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is final by them. What comes after a stop is dropped."""
        assert not self._finished or self.stopped is not None, "an answer that is finished takes no more tokens"
        new = ""
        for id in ids:
            if self.stopped is not None:
                break
            new += self._passed(self._pieces.add(id))
        return new

    def finish(self) -> str:
        """Ends the answer; returns what was held back. A stop may be in it, of a character that was not final."""
        new = ""
        if not self._finished and self.stopped is None:
            new = self._passed(self._pieces.finish())
            if self.stopped is None:
                self._released.append(self._waiting)
                new, self._waiting = new + self._waiting, ""
        self._finished = True
        return new

    def _passed(self, piece: str) -> str:
        """Moves a piece of text by the stops; returns what may be given out."""
        if not piece:
            return ""
        begins = self._pieces.begins
        # a stop ends after this many characters at least: its last one is of a token that may end the answer
        least = begins[self._min_tokens] + 1 if self._min_tokens < len(begins) else self._length + len(piece) + 1
        ends = [(end, stop) for stop in self._stops if (end := stop.find(piece, least - self._length)) is not None]
        text = self._waiting + piece
        if ends:
            end, stop = min(ends, key=lambda found: (found[0], -len(found[1].text)))
            self.stopped = stop.text
            kept = len(self._waiting) + end - (0 if self._include_stop else len(stop.text))
            self._length += kept - len(self._waiting)
            text, self._waiting = text[:kept], ""
        else:
            self._length += len(piece)
            held = max((stop.matched for stop in self._stops), default=0)
            text, self._waiting = text[: len(text) - held], text[len(text) - held :]
        self._released.append(text)
        return text


class _Pieces:
    """An answer's text in final pieces, whatever its stops.

    begins: for each token, how many characters are before its text; one that comes after half a character begins with
    it, whether it is the other half or not.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self.begins: list[int] = []
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._span, self._margin = (SPAN_CLEANED, HELD_CLEANED) if tokenizer.cleans_up else (SPAN, 0)
        self._window: list[int] = []
        # of the window's text: given out, and decoded
        self._shown = 0
        self._decoded = 0
        # characters of all decoded text
        self._length = 0
        # a run of bytes: its ids with their bytes, None for a token without text among them
        self._run: list[tuple[int, int | None]] = []

    def add(self, id: int) -> str:
        """Takes a token; returns the text that is final by it."""
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
        # the token shows where the run ends; the window must not begin to move before it is in
        before = self._read_run(self._margin)
        self._begin()
        return before + self._read([id], self._margin)

    def _begin(self) -> None:
        # cleaning may take a space away that was there when the token before began
        self.begins.append(max(self._length, self.begins[-1] if self.begins else 0))

    def finish(self) -> str:
        """Returns what is left: a run, half a character."""
        before = self._read_run(0) if self._run else ""
        return before + self._read([], 0, ended=True)

    def _read_run(self, margin: int) -> str:
        ids = [id for id, byte in self._run if byte is not None]
        start, first = self._length, len(self.begins) - len(self._run)
        piece = self._read(ids, margin, ended=True)
        spans = _spans(bytes(byte for _, byte in self._run if byte is not None))
        # a space that decode takes away at the beginning of an answer
        lost = sum(1 for span in spans if span) - (self._length - start)
        # characters that are complete before each byte; a token without text is where the next byte is
        before = [0, *accumulate(spans)]
        place = 0
        for i, (_, byte) in enumerate(self._run):
            self.begins[first + i] = start + max(0, before[place] - lost)
            place += byte is not None
        self._run = []
        return piece

    def _read(self, ids: list[int], margin: int, *, ended: bool = False) -> str:
        """Decodes the window with more tokens; returns what is new in it."""
        decode = self._tokenizer.decode
        self._window += ids
        text = decode(self._window, self._skip_special)
        half = not ended and text.endswith("\ufffd")
        whole = len(text) - half
        self._length += whole - self._decoded
        final = max(self._shown, whole - margin)
        piece, self._shown, self._decoded = text[self._shown : final], final, whole
        # after a run the token that ended it is still to come
        if not ended and len(self._window) >= 2 * self._span:
            self._window = self._window[self._start() :]
            cut = len(decode(self._window, self._skip_special)) - len(text)
            self._shown += cut
            self._decoded += cut
        return piece

    def _start(self) -> int:
        """Where the window moves to: SPAN tokens from its end, or before a run, if its text may still be held back."""
        start = len(self._window) - self._span
        while self._margin and start and self._window[start - 1] in self._tokenizer.byte_ids:
            start -= 1
        return start


def _spans(run: bytes) -> list[int]:
    """For each byte, whether a character of the run is complete with it; every byte of what is no UTF-8 is one."""
    try:
        run.decode()
    except UnicodeDecodeError:
        return [1] * len(run)
    # complete before a byte that does not continue one, and at the end
    return [int(i + 1 == len(run) or run[i + 1] & 0xC0 != 0x80) for i in range(len(run))]


class _Stop:
    """One stop and how much of it the text so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # borders[n]: the longest proper beginning of text[:n] that also ends it
        self._borders = [0, 0]
        for character in text[1:]:
            border = self._borders[-1]
            while border and text[border] != character:
                border = self._borders[border]
            self._borders.append(border + (text[border] == character))

    def find(self, piece: str, least: int) -> int | None:
        """Moves on by a piece of text; returns where in it the stop first ends, if after least characters."""
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
