"""The marks of harmony, and a message's header: its channel, and the function that it calls."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rooftile.engine.chat.tools.tool import NAME

if TYPE_CHECKING:
    from rooftile.engine.text.tokenizer import Tokenizer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FUNCTIONS = "functions."
# a prompt ends with it, behind the mark: the model writes the rest of the header
OPENING = "assistant"
_MARK = re.compile("(" + "|".join(map(re.escape, MARKS)) + ")")
# tokens of a prompt that are searched for its last turn where the marks are no tokens of their own
_TAIL = 64


class Header(NamedTuple):
    """Tells whom a message is for.

    Args:
        channel: the channel; empty if there is none.
        recipient: what stands behind `to=`; empty for the user.
        ended: whether something follows the recipient, so that it is whole.
    """

    channel: str = ""
    recipient: str = ""
    ended: bool = True

    @classmethod
    def of(cls, text: str) -> Header:
        """Returns what a header says, which may lack its last part.

        Example:
            >>> Header.of("<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json")
            Header(channel='commentary', recipient='functions.add', ended=True)
        """
        _, *pairs = _MARK.split(text)
        channel = recipient = ""
        for mark, words in zip(pairs[::2], map(str.split, pairs[1::2]), strict=True):
            channel = words[0] if mark == CHANNEL and words and not words[0].startswith("to=") else channel
            recipient = next((word.removeprefix("to=") for word in words if word.startswith("to=")), recipient)
        return cls(channel, recipient, recipient == "" or not text.endswith(recipient))

    def function(self, known: Container[str]) -> str | None:
        """Returns the function that the message calls; None if it calls none, such as a tool of the model's own."""
        name = self.recipient.removeprefix(FUNCTIONS)
        called = self.recipient.startswith(FUNCTIONS) or name in known
        return name if called and NAME.fullmatch(name) is not None else None


def split_at_marks(text: str) -> list[str]:
    """Returns a text in pieces, each a mark or without one.

    Example:
        >>> split_at_marks("a<|end|><|start|>assistant")
        ['a', '<|end|>', '<|start|>', 'assistant']
    """
    return [piece for piece in _MARK.split(text) if piece]


def without_marks(text: str) -> str:
    """Returns a text without its marks."""
    return _MARK.sub("", text)


def last_turn(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Returns the text of a prompt's last turn, which its answer continues, without the mark that begins it.

    Args:
        tokenizer: the model's tokenizer.
        ids: the prompt's tokens.
    """
    start = tokenizer.added_id(START)
    place = next((place for place in range(len(ids) - 1, -1, -1) if ids[place] == start), None) if start is not None else None
    tail = ids[-_TAIL:] if place is None else ids[place:]
    _, mark, turn = tokenizer.decode(tail, skip_special=False).rpartition(START)
    return turn if mark else OPENING
