"""The border between a prompt and its answer.

The text of an answer is what decode gives for prompt and answer together, without the prompt's text. So the prompt's last tokens
are decoded with the answer's first ones. This is what they decide:

- Whether a text begins with the answer: only then its first token loses a leading space, or keeps a "##".
- A character that the prompt has begun and the answer completes. It belongs to the answer's text, with U+FFFD in its place if it
  is never completed: the prompt's text ends before it.
- A run of byte tokens (byte fallback) that goes on in the answer. Whole characters of it belong to the prompt, whatever follows.
  Only where the run was no UTF-8 within the prompt already is it kept whole: decode writes U+FFFD for each of its bytes. The last
  LONGEST bytes of a run are looked at.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rooftile.engine.text.tokenizer import Tokenizer

LONGEST = 256


class Border(NamedTuple):
    """The last tokens of a prompt, as far as they decide what the answer's first ones decode to."""

    window: list[int]
    """Tokens of the prompt's text."""
    shown: int
    """How many characters of the prompt's text come from them, and from whole characters of the run."""
    half: bool
    """Whether the window ends with half a character."""
    run: list[tuple[int, int]]
    """Byte tokens behind the window that wait for the answer's, with their bytes."""


def border_of(tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool, span: int) -> Border:
    """Returns the border of a prompt, with at most `span` tokens before the run."""
    run: list[tuple[int, int]] = []
    window: list[int] = []
    for id in _backwards(tokenizer, prompt, skip_special):
        byte = None if window else tokenizer.byte_ids.get(id)
        if byte is not None:
            run.append((id, byte))
            # up to a character's first byte, which is at most three before
            if len(run) >= LONGEST and (byte & 0xC0 != 0x80 or len(run) == LONGEST + 3):
                break
        else:
            window.append(id)
            if len(window) == span:
                break
    window.reverse()
    run.reverse()
    raw = bytes(byte for _, byte in run)
    whole, broken = len(raw) - _begun(raw), 0
    if is_text(raw[:whole]):
        if whole and not window and tokenizer.plain_id is not None:
            # the answer does not begin the text, and nothing but these bytes says so
            window = [tokenizer.plain_id]
        run = run[whole:]
    else:
        broken = whole
    text = tokenizer.decode(window, skip_special)
    half = not run and text.endswith("\ufffd") and _begun(b"".join(map(tokenizer.bytes_of, window))) > 0
    if tokenizer.cleans_up and window and not half and tokenizer.plain_id is not None:
        # spaces are not removed across the border: the prompt's text stays as it was sent
        window = [tokenizer.plain_id]
        text = tokenizer.decode(window, skip_special)
    return Border(window, len(text) - half + broken, half, run)


def prompt_text(tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool) -> str:
    """Returns the text of a prompt, up to a character that only the answer may complete."""
    border = border_of(tokenizer, prompt, skip_special, 4)
    waiting = _begun(bytes(byte for _, byte in border.run))
    if not waiting:
        text = tokenizer.decode(prompt, skip_special)
        return text[:-1] if border.half else text
    spoken = [id for id in prompt if not tokenizer.is_silent(id, skip_special)]
    return tokenizer.decode(spoken[:-waiting], skip_special)


def _backwards(tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool) -> Iterator[int]:
    """Yields the tokens that decode does not skip, the last first."""
    return (id for id in reversed(prompt) if not tokenizer.is_silent(id, skip_special))


def _begun(raw: bytes) -> int:
    """Returns how many bytes at the end begin a character that more bytes may complete."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(raw)
    return len(decoder.getstate()[0])


def is_text(raw: bytes) -> bool:
    """Tells whether bytes are UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
