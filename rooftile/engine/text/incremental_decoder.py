"""Decodes the tokens of an answer into final pieces of text.

The text of a token depends on its neighbours: the first of a text loses its leading space, and the bytes of several tokens can
make one character. So a few tokens are decoded together, in a window that moves along:

    text(1 .. n+k) = text(1 .. n) + (decode(window + tokens n+1 .. n+k) without its beginning, decode(window))

The first window begins with the prompt's last tokens (`border.py`). Only the window is decoded again, at most 2 SPAN tokens, so a
token costs the same however long the answer is. The difference is right for these reasons:

- What happens at the beginning of a text (a space removed, a "##" kept) happens to the window's first token in both decodes.
- A character has at most 4 bytes. For an incomplete one decode writes one U+FFFD at the very end, which is held back. SPAN tokens
  have at least 4 bytes, so every window contains a leading byte, from which on UTF-8 is decoded alike.
- Tokens of one byte each (byte fallback) are decoded as a run: if the run is not valid UTF-8, each of its bytes becomes a U+FFFD,
  even those that formed a character before. So a run is held back until another token ends it: no window ends inside a run.
- Tokens that decode skips (special tokens) never enter a window.
- A checkpoint that removes spaces before punctuation changes at most the last 8 characters: these are held back, and the window
  is longer.

Tokens that are read together are decoded together, AT_ONCE of them, up to one that ends in a whole character. If its text has
come, the text of all tokens before it has. That is certain of a token that spells bytes; others are decoded alone. Tokens that
decide what is held back are decoded one by one: of one byte (byte fallback), of half a character at the end, and all those of a
checkpoint that removes spaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import accumulate

from rooftile.engine.text.border import border_of, is_text
from rooftile.engine.text.tokenizer import Tokenizer

SPAN = 4
SPAN_CLEANED = 32
HELD_CLEANED = 8
# number of tokens that are decoded together: the window beside them costs little, and other threads need not wait
AT_ONCE = 256
# fewer are not cheaper together: the last is decoded by itself, and the window is cut
TOGETHER = 4


class IncrementalDecoder:
    """Decodes an answer into final pieces of text; it knows nothing of stop strings.

    `begins` has, for each token, how many characters come before its text. A token that follows half a character begins with
    that character, whether it completes it or not. Of tokens that were decoded together all have the place of the first: it only
    counts that they begin within the final text.

    Args:
        tokenizer: the checkpoint's tokenizer.
        skip_special: whether special tokens have no text.
        prompt: the tokens that the answer continues.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, prompt: Sequence[int] = ()) -> None:
        self.begins: list[int] = []
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # None when its border has been read; text that is not read costs nothing
        self._prompt: Sequence[int] | None = prompt
        self._span, self._margin = (SPAN_CLEANED, HELD_CLEANED) if tokenizer.cleans_up else (SPAN, 0)
        self._window: list[int] = []
        # characters of the window's text that were returned, and that are decoded
        self._shown = 0
        self._decoded = 0
        # whether the text ends with half a character, as far as can be told
        self._half = False
        # characters of the whole decoded text
        self._length = 0
        # the run of byte tokens at the end: ids with their bytes, None for a token without text among them
        self._run: list[tuple[int, int] | None] = []

    def fork(self) -> IncrementalDecoder:
        """Returns the same place for another continuation; `begins` has the last places alone."""
        other = copy(self)
        other.begins, other._run = self.begins[-1 - len(self._run) :], [*self._run]
        return other

    def add(self, id: int) -> str:
        """Takes a token; returns the text that it makes final."""
        if self._prompt is not None:
            self._begin_behind(self._prompt)
        if self._tokenizer.is_silent(id, self._skip_special):
            self.count_silent()
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

    def add_all(self, ids: Sequence[int]) -> str:
        """Takes tokens; returns the text that they make final, from few decodes."""
        if self._prompt is not None:
            self._begin_behind(self._prompt)
        plain = not self._run and not self._margin and len(ids) <= AT_ONCE
        if plain and all(map(self._tokenizer.spells_bytes, ids)):
            state, start = self._state(), self._length
            piece = self._read(ids, 0)
            if not self._half or len(ids) == 1:
                self.begins += [start] * len(ids)
                return piece
            self._restore(state)
        if self._margin or len(ids) < TOGETHER:
            return "".join([self.add(id) for id in ids])
        found, start = [], 0
        while start < len(ids):
            # a run of bytes that waits is ended by the token after it
            end = start if self._run else self._end_of_plain(ids, start)
            whole = self._end_of_whole(ids, start, end)
            if whole - start >= TOGETHER:
                found.append(self._add_together(ids[start:whole]))
                start = whole
            end = max(end, start + 1)
            found += [self.add(id) for id in ids[start:end]]
            start = end
        return "".join(found)

    def _begin_behind(self, prompt: Sequence[int]) -> None:
        """Begins the window with a prompt's last tokens."""
        self._prompt = None
        border = border_of(self._tokenizer, prompt, self._skip_special, SPAN)
        self._window, self._half, self._run = border.window, border.half, [*border.run]
        self._shown = self._decoded = border.shown

    def _end_of_plain(self, ids: Sequence[int], start: int) -> int:
        """Returns where tokens end that decode neither skips nor joins to runs; they are at most AT_ONCE."""
        silent, bytes_, skip, end = self._tokenizer.is_silent, self._tokenizer.byte_ids, self._skip_special, start
        most = min(len(ids), start + AT_ONCE)
        while end < most and ids[end] not in bytes_ and not silent(ids[end], skip):
            end += 1
        return end

    def _end_of_whole(self, ids: Sequence[int], start: int, end: int) -> int:
        """Returns where the last token ends that ends in a whole character; `start` if that is not near the end."""
        for whole in range(end, max(start, end - SPAN), -1):
            # the bytes of the last characters are enough
            if not self._tokenizer.decode(ids[max(start, whole - 2 * SPAN) : whole], self._skip_special).endswith("\ufffd"):
                return whole
        return start

    def _add_together(self, ids: Sequence[int]) -> str:
        """Takes tokens of which the last ends in a whole character."""
        state, start = self._state(), self._length
        piece = self._read(ids[:-1], 0)
        last = self._length
        piece += self._read(ids[-1:], 0)
        if self._length == last:
            # the last token has no text, and others before it may have none: where they begin is found one by one
            self._restore(state)
            return "".join([self.add(id) for id in ids])
        self.begins += [start] * len(ids)
        return piece

    def _state(self) -> tuple[list[int], int, int, int]:
        return self._window, self._shown, self._decoded, self._length

    def _restore(self, state: tuple[list[int], int, int, int]) -> None:
        self._window, self._shown, self._decoded, self._length = state

    def _begin(self) -> None:
        # removing spaces before punctuation may shorten the text below where the previous token began
        self.begins.append(max(self._length, self.begins[-1] if self.begins else 0))

    def count_silent(self) -> None:
        """Counts a token that has no text."""
        if self._run:
            self._run.append(None)
        self._begin()

    def flush(self) -> str:
        """Returns the text of a run of byte tokens, unless it ends within a character."""
        return self._read_run(self._margin) if self._run and is_text(self._run_bytes()) else ""

    def finish(self) -> str:
        """Returns the rest: a run of byte tokens, or half a character."""
        if self._prompt is not None:
            self._begin_behind(self._prompt)
        before = self._read_run(0) if self._run else ""
        return before + self._read([], 0, ended=True)

    def _read_run(self, margin: int) -> str:
        ids = [each[0] for each in self._run if each is not None]
        start, first = self._length, len(self.begins) - len(self._run)
        piece = self._read(ids, margin, ended=True)
        spans = _spans(self._run_bytes())
        # what is not the answer's: bytes of the prompt, and one space that decode removes where a text begins
        lost = sum(1 for span in spans if span) - (self._length - start)
        # characters that are complete before each byte; a token without text begins where the next byte does
        before = [0, *accumulate(spans)]
        place = 0
        for i, each in enumerate(self._run):
            # the first bytes may be the prompt's
            if first + i >= 0:
                least = self.begins[first + i - 1] if first + i else 0
                self.begins[first + i] = max(least, start + before[place] - lost)
            place += each is not None
        self._run = []
        return piece

    def _run_bytes(self) -> bytes:
        return bytes(each[1] for each in self._run if each is not None)

    def _read(self, ids: Sequence[int], margin: int, *, ended: bool = False) -> str:
        """Adds tokens to the window and decodes it; returns the new text."""
        decode = self._tokenizer.decode
        self._window = [*self._window, *ids]
        text = decode(self._window, self._skip_special)
        self._half = not ended and text.endswith("\ufffd")
        whole = len(text) - self._half
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
    if not is_text(run):
        return [1] * len(run)
    # a character is complete before a byte that does not continue it, and at the end
    return [int(i + 1 == len(run) or run[i + 1] & 0xC0 != 0x80) for i in range(len(run))]
