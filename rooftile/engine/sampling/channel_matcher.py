"""Closes gpt-oss's thoughts where they have become too long, and lets a grammar begin behind them.

    header --<|message|>--> thought, or another text --a mark that ends--> header

Thoughts are the messages in the channel analysis. `ChannelBudget` closes the message in which their tokens are spent; from there
on no other channel than commentary and final is opened. It needs a token on the host only where it acts.

`ChannelGrammar` lets an answer have one thought or none, and then a message that follows a grammar: in the channel final, or with
a header of the grammar's own, such as a call's.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Literal

from rooftile.engine.chat.harmony.header import (
    ANALYSIS,
    CALL,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MESSAGE,
    OPENING,
    RETURN,
    START,
    Header,
)  # fmt: skip
from rooftile.engine.sampling.steering import ENDLESS, Mask, Steering, allows, free_mask, mask_of, mask_without
from rooftile.errors import InvalidInput

if TYPE_CHECKING:
    from rooftile.engine.text.tokenizer import Tokenizer

# more tokens without a mark are a text, and no header
LONGEST_HEADER = 64


class Marks:
    """The tokens of harmony's marks and words.

    Args:
        tokenizer: the model's tokenizer.

    Raises:
        InvalidInput: a mark is no token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        found = {mark: tokenizer.added_id(mark) for mark in (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)}
        missing = next((mark for mark, id in found.items() if id is None), None)
        if missing is not None:
            raise InvalidInput(f"the tokenizer has no token {missing}, which answers in channels are steered by")
        ids = {mark: id for mark, id in found.items() if id is not None}
        self.start, self.channel, self.message, self.end = (ids[mark] for mark in (START, CHANNEL, MESSAGE, END))
        self.ends = frozenset(ids[mark] for mark in (END, CALL, RETURN))
        self.others = frozenset(ids.values()) - {self.end}
        """All marks but the one that ends a thought."""
        self.analysis, self.commentary, self.final, opening = (
            tuple(tokenizer.encode(word, special=False)) for word in (ANALYSIS, COMMENTARY, FINAL, OPENING)
        )
        self.opening = (self.start, *opening)
        """The tokens that begin a message of the model."""


class Place:
    """The place of an answer in its messages.

    Args:
        tokenizer: the model's tokenizer.
        marks: its marks.
        prompt: the tokens before the answer; the last turn counts.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Marks, prompt: Sequence[int]) -> None:
        self._tokenizer, self._marks = tokenizer, marks
        self.header: tuple[int, ...] | None = marks.opening
        """The tokens of the header so far; None in a text."""
        self.channel = ""
        """The channel of the text; "call" for a message to a function."""
        start = next((place for place in range(len(prompt) - 1, -1, -1) if prompt[place] == marks.start), len(prompt))
        for token in prompt[start:]:
            self.take(token)

    @property
    def is_thought(self) -> bool:
        """Whether the next token belongs to a thought, or ends it."""
        return self.header is None and self.channel == ANALYSIS

    @property
    def opens_channel(self) -> bool:
        """Whether the channel's name comes next."""
        return self.header is not None and self.header[-1:] == (self._marks.channel,)

    def take(self, token: int) -> None:
        """Takes the next token."""
        marks = self._marks
        if token == marks.start:
            self.header = (token,)
        elif self.header is None:
            self.header = () if token in marks.ends else None
        elif token == marks.message:
            read = Header.of(self._tokenizer.decode(self.header, skip_special=False))
            self.header, self.channel = None, "call" if read.recipient.startswith(FUNCTIONS) else read.channel
        elif token in marks.ends:
            self.header = ()
        else:
            self.header = (*self.header[-LONGEST_HEADER:], token)


class ChannelBudget:
    """Closes the thoughts of one answer when their tokens are spent.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the prompt's tokens.
        vocabulary: the number of the model's logits.
        budget: the most tokens of all thoughts.

    Raises:
        InvalidInput: a mark is no token.
    """

    over = False

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, vocabulary: int, budget: int) -> None:
        self._marks = marks = Marks(tokenizer)
        self._place = Place(tokenizer, marks, prompt)
        self._vocabulary, self._left = vocabulary, budget
        self._any: Mask = free_mask(vocabulary)
        self._others: Mask = mask_of((marks.commentary[0], marks.final[0]), vocabulary)
        # tokens that come next, one after the other
        self._forced: tuple[int, ...] = ()
        self._look()

    def fork(self) -> ChannelBudget:
        """Returns the same place for another continuation."""
        other = copy(self)
        other._place = copy(self._place)
        return other

    def take(self, token: int) -> None:
        """Takes an answer's next token."""
        self._left -= self._place.is_thought
        self._forced = self._forced[1:]
        self._place.take(token)
        self._look()

    def _look(self) -> None:
        place, marks, spent = self._place, self._marks, self._left <= 0
        if place.is_thought and spent and not self._forced:
            self._forced = (marks.end, *marks.opening, marks.channel)
        self.mask, self.free = self._any, 0
        if self._forced:
            self.mask = mask_of(self._forced[:1], self._vocabulary)
        elif spent and place.opens_channel:
            self.mask = self._others
        elif place.is_thought:
            self.free = self._left
        elif place.header is None and place.channel == FINAL:
            # the last message
            self.free = ENDLESS
        else:
            # the mark of a channel is one token behind a text's end at the earliest, and so is the text of a thought
            self.free = max(self._left, 0) + (2 if place.header is None else 1)


class ChannelGrammar:
    """One answer's thought, if it has one, and then its grammar.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the prompt's tokens.
        vocabulary: the number of the model's logits.
        ends: the tokens that end an answer; they do not end a thought.
        budget: the most tokens of the thought; None for any number.
        grammar: what the message behind the thought follows, or its text.

    Raises:
        InvalidInput: a mark is no token.
    """

    free = 0

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], *, vocabulary: int, ends: frozenset[int], budget: int | None,
        grammar: Steering,
    ) -> None:  # fmt: skip
        self._marks = marks = Marks(tokenizer)
        self._vocabulary, self._grammar, self._left = vocabulary, grammar, ENDLESS if budget is None else budget
        self._has_header = allows(grammar.mask, marks.channel)
        self._thinking: Mask = mask_without(ends | marks.others, vocabulary)
        self._may_think = self._left > 0
        place = Place(tokenizer, marks, prompt)
        self._forced: tuple[int, ...] = ()
        self._stage: Literal["channel", "thought", "grammar"] = "grammar"
        if place.is_thought:
            self._stage = "thought"
        elif place.header is not None:
            # a header that has begun otherwise is left as it is, and ends in the grammar's text
            self._stage = "channel"
            self._forced = () if place.opens_channel else (marks.channel,)
        self._look()

    def fork(self) -> ChannelGrammar:
        """Returns the same place for another continuation."""
        other = copy(self)
        other._grammar = self._grammar.fork()
        return other

    @property
    def over(self) -> bool:
        """Whether the grammar allows nothing more."""
        return self._stage == "grammar" and not self._forced and self._grammar.over

    def take(self, token: int) -> None:
        """Takes an answer's next token.

        Raises:
            GrammarFailed: the grammar does not have it.
        """
        marks = self._marks
        if self._forced:
            self._forced = self._forced[1:]
        elif self._stage == "grammar":
            self._grammar.take(token)
        elif self._stage == "thought":
            self._left -= 1
            if token == marks.end:
                self._leave_thought()
        elif token == marks.analysis[0] and self._may_think:
            self._stage, self._forced = "thought", (*marks.analysis[1:], marks.message)
        else:
            self._stage = "grammar"
            if self._has_header:
                self._grammar.take(marks.channel)
                self._grammar.take(token)
            else:
                self._forced = (*marks.final[1:], marks.message)
        self._look()

    def _leave_thought(self) -> None:
        self._stage, self._may_think = "channel", False
        self._forced = (*self._marks.opening, self._marks.channel)

    def _look(self) -> None:
        if self._stage == "thought" and not self._forced and self._left <= 0:
            self._leave_thought()
            self._forced = (self._marks.end, *self._forced)
        if self._forced:
            self.mask = mask_of(self._forced[:1], self._vocabulary)
        elif self._stage == "grammar":
            self.mask = self._grammar.mask
        elif self._stage == "thought":
            self.mask = self._thinking
        else:
            self.mask = self._mask_of_channels()

    def _mask_of_channels(self) -> Mask:
        """Returns the mask of the names of channels: of a thought, and of the grammar's message."""
        marks, found = self._marks, mask_of((), self._vocabulary)
        if self._may_think:
            found = found | mask_of(marks.analysis[:1], self._vocabulary)
        if not self._has_header:
            return found | mask_of(marks.final[:1], self._vocabulary)
        behind = self._grammar.fork()
        behind.take(marks.channel)
        return found | behind.mask
