"""`ThoughtMatcher`: closes a thought that has become too long, and lets a grammar begin behind the thought.

    before --the first tokens of a mark--> inside --the mark that ends, written or forced--> after

The reader of thoughts says where the thought is, from the text: a caller is shown the same. Only a grammar needs each token on
the host. A budget alone needs it where it is spent, and leaves all other tokens free.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from rooftile.engine.chat.parts import Content, PlainReader
from rooftile.engine.chat.thinking import ThoughtReader, begun
from rooftile.engine.sampling.steering import ENDLESS, Mask, Steering, allows, free_mask, mask_of, mask_without
from rooftile.engine.text.incremental_decoder import IncrementalDecoder

if TYPE_CHECKING:
    from rooftile.engine.chat.thought_formats import Stage, ThoughtFormat
    from rooftile.engine.text.tokenizer import Tokenizer


class ThoughtMatcher:
    """The place of one answer in its thought, and then in its grammar.

    Args:
        tokenizer: the model's tokenizer.
        form: the model's marks around thoughts.
        stage: where the prompt ends.
        prompt: the prompt's tokens.
        vocabulary: the number of the model's logits.
        ends: the tokens that end an answer; with a grammar they do not end a thought.
        budget: the most tokens of the thought; None for any number.
        grammar: what the answer follows behind its thought; None for free text.
    """

    def __init__(
        self, tokenizer: Tokenizer, form: ThoughtFormat, stage: Stage, prompt: Sequence[int], *, vocabulary: int,
        ends: frozenset[int], budget: int | None, grammar: Steering | None,
    ) -> None:  # fmt: skip
        self._tokenizer, self._form, self._vocabulary = tokenizer, form, vocabulary
        self._reader = ThoughtReader(form, stage, PlainReader())
        self._decoder = IncrementalDecoder(tokenizer, False, prompt)
        self._budget, self._spent, self._grammar = budget, 0, grammar
        # tokens that come next, one after the other
        self._forced: list[int] = []
        self._any: Mask = free_mask(vocabulary)
        self._thinking: Mask = self._any if grammar is None else mask_without(ends, vocabulary)
        # the first tokens of the marks that may begin a thought, with those that follow
        begins = [tokenizer.encode(mark, special=False) for mark in reversed(form.begins)]
        self._begins = {ids[0]: ids[1:] for ids in begins if ids}
        # spaces that models write behind a mark, before what a grammar is about; once
        self._space = {ids[0] for ids in [tokenizer.encode("\n\n", special=False)] if len(ids) == 1}
        self._in_grammar = False
        self._look()

    def fork(self) -> ThoughtMatcher:
        """Returns the same place for another continuation."""
        other = copy(self)
        # the reader of what is no thought keeps nothing
        other._reader, other._decoder = copy(self._reader), self._decoder.fork()
        other._forced, other._grammar = [*self._forced], None if self._grammar is None else self._grammar.fork()
        return other

    @property
    def over(self) -> bool:
        """Whether the grammar allows nothing more."""
        return self._grammar is not None and self._in_grammar and self._grammar.over

    def take(self, token: int) -> None:
        """Takes an answer's next token.

        Raises:
            GrammarFailed: the grammar does not have it.
        """
        if self._in_grammar:
            self._take_in_grammar(token)
        elif self._reader.stage == "after" and not self._forced and token in self._space and not self._grammar_has(token):
            self._space = set()
        elif self._reader.stage == "after" and not self._forced:
            self._take_in_grammar(token)
        else:
            self._take_in_thought(token)
        self._look()

    def _take_in_grammar(self, token: int) -> None:
        self._in_grammar = True
        if self._grammar is not None:
            self._grammar.take(token)

    def _take_in_thought(self, token: int) -> None:
        """Takes a token of the thought, of a mark, or of an answer that may still begin a thought."""
        before, was_forced = self._reader.stage, bool(self._forced)
        begins = before == "before" and token in self._begins and not self._grammar_has(token)
        if self._grammar is not None and before == "before" and not begins and not was_forced:
            # no thought: the grammar has the whole answer
            self._take_in_grammar(token)
            return
        if was_forced:
            self._forced.pop(0)
        elif begins and self._grammar is not None:
            self._forced = list(self._begins[token])
        text = self._decoder.add(token)
        parts = self._reader.feed(text)
        if before == "inside":
            self._spent += 1
        if self._reader.stage == "after" and not self._forced and self._grammar is not None:
            self._take_rest("".join(part.text for part in parts if isinstance(part, Content)))

    def _take_rest(self, text: str) -> None:
        """Gives the grammar a text that stands in one token with the end of a mark."""
        for id in self._tokenizer.encode(text, special=False) if text else ():
            self._take_in_grammar(id)

    def _grammar_has(self, token: int) -> bool:
        return self._grammar is not None and allows(self._grammar.mask, token)

    def _look(self) -> None:
        """Says what may come next."""
        stage, grammar = self._reader.stage, self._grammar
        if stage == "inside" and not self._forced and self._budget is not None and self._spent >= self._budget:
            self._forced = self._closing_tokens()
        if self._forced:
            # what comes is known, but a mask holds one token
            self.mask, self.free = mask_of(self._forced[:1], self._vocabulary), 0
        elif self._in_grammar or stage == "after":
            self.mask = self._any if grammar is None else self._mask_behind(grammar)
            self.free = ENDLESS if grammar is None else 0
        elif stage == "before":
            self.mask = self._any if grammar is None else grammar.mask | mask_of(self._begins, self._vocabulary)
            # a thought begins with a token of its own
            self.free = 0 if grammar is not None else 1 + (ENDLESS if self._budget is None else self._budget)
        else:
            self.mask = self._thinking
            self.free = 0 if grammar is not None or self._budget is None else self._budget - self._spent

    def _mask_behind(self, grammar: Steering) -> Mask:
        """Returns the mask behind the thought: of the grammar, and once of spaces."""
        return grammar.mask if self._in_grammar else grammar.mask | mask_of(self._space, self._vocabulary)

    def _closing_tokens(self) -> list[int]:
        """Returns the tokens of the mark that closes the thought; a mark that the model has begun is completed."""
        size, mark = max((begun(self._reader.held, mark), mark) for mark in self._form.ends)
        text = mark[size:] + self._form.close.partition(self._form.ends[0])[2] if size else self._form.close
        self._space = set()
        return [id for id in self._tokenizer.encode(text, special=False) if id < self._vocabulary]
