"""`CallMatcher`: leaves an answer free until it begins a call, which then follows a grammar to its end.

    free --the beginning of a call is complete--> in the call --the grammar is over--> free, or the answer ends

The text of the answer says where a call begins, as a reader of calls sees it. One token may complete the beginning and go on:
what it goes on with belongs to the grammar, too, so where a beginning could be completed, tokens that go on wrongly are left out.

One grammar for the whole answer, with free text in it, would make a mask of the whole vocabulary for every token of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from rooftile.engine.chat.parts import Content, PlainReader
from rooftile.engine.chat.thinking import ThoughtReader
from rooftile.engine.chat.tools.beginnings import Watch
from rooftile.engine.sampling.grammar import GrammarFailed, Matcher
from rooftile.engine.sampling.long_tokens import LongTokens
from rooftile.engine.sampling.steering import ENDLESS, Mask, free_mask, mask_without
from rooftile.engine.text.incremental_decoder import IncrementalDecoder

if TYPE_CHECKING:
    from rooftile.engine.chat.thought_formats import Stage, ThoughtFormat
    from rooftile.engine.text.tokenizer import Tokenizer


class CallMatcher:
    """The place of one answer among its calls.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the prompt's tokens.
        watch: looks for the beginning of a call.
        grammar: what a call follows from its beginning on.
        long_tokens: the tokens that complete a beginning and go on.
        vocabulary: the number of the model's logits.
        several: whether the answer goes on behind a call.
        thoughts: the model's marks around thoughts, in which no call begins, and where the prompt ends; None for none.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], *, watch: Watch, grammar: Matcher, long_tokens: LongTokens,
        vocabulary: int, several: bool, thoughts: tuple[ThoughtFormat, Stage] | None,
    ) -> None:  # fmt: skip
        self._decoder = IncrementalDecoder(tokenizer, False, prompt)
        self._thoughts = None if thoughts is None else ThoughtReader(*thoughts, PlainReader())
        self._watch = watch
        self._beginning, self._long_tokens, self._several = grammar, long_tokens, several
        self._any: Mask = free_mask(vocabulary)
        self._call: Matcher | None = None
        self.over = False
        """Whether the answer has had the one call that it may have."""
        self._look()

    def fork(self) -> CallMatcher:
        """Returns the same place for another continuation."""
        other = copy(self)
        # the reader of what is no thought keeps nothing
        other._thoughts = copy(self._thoughts)
        other._decoder, other._watch = self._decoder.fork(), self._watch.fork()
        other._call = None if self._call is None else self._call.fork()
        return other

    def take(self, token: int) -> None:
        """Takes an answer's next token.

        Raises:
            GrammarFailed: the grammar of a call does not have it.
        """
        text = self._decoder.add(token)
        if self._call is not None:
            self._call.take(token)
        elif not self._watch.is_over:
            begun = self._watch.feed(text if self._thoughts is None else self._behind_thought(text))
            self._call = None if begun is None else self._begin(begun)
        if self._call is not None and self._call.over:
            self._call, self.over = None, not self._several
            self._watch.reset()
        self._look()

    def _behind_thought(self, text: str) -> str:
        """Takes the answer's next text; returns what of it is no thought."""
        assert self._thoughts is not None
        return "".join(part.text for part in self._thoughts.feed(text) if isinstance(part, Content))

    def _begin(self, begun: str) -> Matcher | None:
        """Returns the grammar behind the text of a call that has begun; None for a text that it does not have."""
        try:
            return self._beginning.behind(begun)
        except GrammarFailed:
            # the beginning is written in a way that readers do not take for one
            self._watch.reset()
            return None

    def _look(self) -> None:
        """Says what may come next."""
        if self._call is not None:
            self.mask, self.free = self._call.mask, 0
        elif self._watch.is_over:
            self.mask, self.free = self._any, ENDLESS
        elif self._thoughts is not None and self._thoughts.stage == "inside":
            # the thought has to end first, by a token of its own
            self.mask, self.free = self._any, 2
        else:
            wrong = [id for whole, rest in self._watch.completions() for id in self._wrong_ends(whole, rest)]
            self.mask = self._any & mask_without(wrong, 32 * len(self._any)) if wrong else self._any
            self.free = self._watch.free

    def _wrong_ends(self, whole: str, rest: str) -> list[int]:
        """Returns the tokens that complete a beginning, and go on as no call does."""
        return [id for more, id in self._long_tokens.behind(rest) if not self._beginning.allows_behind(whole, more)]
