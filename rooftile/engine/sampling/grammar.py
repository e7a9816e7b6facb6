"""Structured output: a grammar says which tokens an answer may have next.

llguidance compiles the grammar and walks along it. Its work is bounded by `LLParserLimits` and not by a clock, so a grammar that
is too complex is refused on a slow machine and on a fast one alike. `Grammars.compile` may run in any thread and lets the
interpreter go on; a `Matcher` belongs to one answer.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from importlib.metadata import version
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftile.engine.chat.tools.beginnings import Beginnings
from rooftile.engine.sampling.gbnf import is_gbnf, lark_of
from rooftile.engine.sampling.grammar_errors import reason_of
from rooftile.engine.sampling.long_tokens import LongTokens
from rooftile.engine.sampling.structural_tags import WHITESPACE, lark_of_tags
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput

# compiled grammars that are kept, and their bytes together
KEPT = 64
KEPT_BYTES = 256 * 2**20
# what a compiled grammar takes, by the characters of its source: llguidance does not say, and 64 schemas of 1,300 properties with
# patterns have taken 97
BYTES_PER_CHARACTER = 128
# the classes that a JSON schema's pattern has in ASCII alone; sets may stand inside of sets
CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[A-Za-z0-9_]", "W": "[^A-Za-z0-9_]"}
# llguidance compiles by recursion, along schemas that refer to one another and rules that name one another: 64 KiB of them take
# some 50 MB of stack, and an overflow would end the process. Memory is taken as far as it is used
STACK_BYTES = 256 * 2**20
# rules of a grammar in Lark's form, counted by their colons: 500 that each name another twice take 2 s
RULES = 512
# the first version of llguidance with the arguments used here
OLDEST = (1, 9)


class GrammarFailed(RuntimeError):
    """A grammar has failed while an answer followed it; this ends the answer's request, and no other."""


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the last ones.

    Args:
        tokenizer: the model's tokenizer.
        vocabulary: the number of the model's logits, which may be more than the tokenizer has tokens.
        ends: the tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = sorted(ends)
        self._no_end = next(id for id in count(tokenizer.vocab_size) if not tokenizer.token(id))
        self._theirs: Any = None
        self._kept: OrderedDict[str, Matcher] = OrderedDict()
        self._long: dict[str, LongTokens] = {}
        added = "|".join(map(re.escape, tokenizer.added_tokens))
        self._added = re.compile(f"({added})") if added else None
        self._lock = threading.Lock()

    def compile(self, structured: Mapping[str, Any]) -> Matcher:
        """Returns the beginning of a grammar.

        Args:
            structured: `structured` of `SamplingParams`, or {"calls": its `calls`}.

        Raises:
            InvalidInput: the package llguidance is missing or too old, or the grammar is wrong or too complex.
        """
        # with its own order, which the answer follows
        key = json.dumps(structured)
        if "calls" in structured:
            # shorter: the rest follows from these
            key = json.dumps([structured["calls"]["grammar"], structured["calls"].get("looser") is not None])
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found.fork()
        made = with_deep_stack(lambda: self._compile(structured))
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > KEPT or BYTES_PER_CHARACTER * sum(map(len, self._kept)) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return made.fork()

    def _compile(self, structured: Mapping[str, Any]) -> Matcher:
        calls = structured.get("calls")
        if calls is not None and calls.get("looser") is not None:
            try:
                return self._compile({"calls": calls | {"looser": None}})
            except InvalidInput:
                return self._compile({"calls": calls | {"grammar": calls["looser"], "looser": None}})
        if calls is not None:
            self.long_tokens(Beginnings.of(calls).last_characters())
        try:
            # before the import: what an old version lacks is an ImportError, too
            check_version(version("llguidance"))
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise InvalidInput("the grammar needs the package llguidance; pip install llguidance") from None
        try:
            # an error of many words would show a client the state of the parser
            limits = LLParserLimits(verbose_errors=False)
            grammar = grammar_of(structured, LLMatcher, self._tokenizer.added_id)
            matcher = LLMatcher(self._tokens(), grammar, log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:
            raise refused(str(error)) from None
        if matcher.is_error():
            raise refused(matcher.get_error())
        try:
            made = Matcher(matcher, self._vocabulary, None if self._ends else self._no_end, self._spelled)
        except GrammarFailed as error:
            raise InvalidInput(f"the grammar cannot be used: {str(error).rpartition(': ')[2]}") from None
        if not made.mask.any():
            raise InvalidInput(
                "the grammar cannot be used: it allows no token of this model where an answer begins: is there a text that "
                "it allows?"
            )
        return made

    def long_tokens(self, characters: Set[str]) -> LongTokens:
        """Returns the tokens that have one of some characters, and others behind it, made at the first use."""
        key = "".join(sorted(characters))
        found = self._long.get(key)
        if found is None:
            found = self._long[key] = LongTokens(self._tokenizer, self._vocabulary, characters)
        return found

    def _spelled(self, text: str) -> list[int]:
        """Returns tokens that spell a text, whose bytes alone count: added tokens where it has some, and any others."""
        theirs = self._tokens()
        pieces = [text] if self._added is None else self._added.split(text)
        ids: list[int] = []
        for piece in pieces:
            id = self._tokenizer.added_id(piece)
            ids += theirs.greedy_tokenize(piece) if id is None else [id]
        return ids

    def _tokens(self) -> Any:
        """Returns llguidance's tree of the tokenizer's tokens, made at the first use."""
        with self._lock:
            if self._theirs is None:
                from llguidance import LLTokenizer

                self._theirs = LLTokenizer(self._with_an_end(), eos_token=self._ends or [self._no_end])
            return self._theirs

    def _with_an_end(self) -> str:
        """Returns the tokenizer, with a token to end a text if the model has none: llguidance asks for one.

        The model never gives this token, so that an answer ends where nothing more is allowed.
        """
        written = self._tokenizer.to_json()
        if self._ends:
            return written
        known = json.loads(written)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        known["added_tokens"].append({"id": self._no_end, "content": f"<|no end {self._no_end}|>", "special": True} | flags)
        return json.dumps(known)


class Matcher:
    """The place of one answer in its grammar.

    Args:
        matcher: an LLMatcher.
        vocabulary: the number of the model's logits.
        end: the token that stands for the end of a text, where the model has none.
        spelled: returns tokens that spell a text.
    """

    def __init__(self, matcher: Any, vocabulary: int, end: int | None, spelled: Callable[[str], list[int]]) -> None:
        self._matcher = matcher
        self._vocabulary, self._end, self._spelled = vocabulary, end, spelled
        # what may follow texts from the beginning on; forks share it
        self._known: dict[tuple[str, str], bool] = {}
        # each token decides about the next
        self.free = 0
        self.over = False
        """Whether the grammar allows nothing more, since the text is complete."""
        self.mask: npt.NDArray[np.int32] = self._next_mask()
        """One bit per token that may come next, in words of 32, the lowest first; no other bit is set. It has none where the
        grammar goes on with a text for which the tokenizer has no token."""

    def fork(self) -> Matcher:
        """Returns the same place for another answer."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def behind(self, text: str) -> Matcher:
        """Returns the place behind a text.

        Raises:
            GrammarFailed: the grammar does not have the text.
        """
        other = self.fork()
        if not other._matcher.consume_tokens(self._spelled(text)):
            raise other._failure()
        other._look()
        return other

    def allows_behind(self, text: str, more: str) -> bool:
        """Tells whether a text may go on with another one."""
        found = self._known.get((text, more))
        if found is None:
            ids = self._spelled(text) + self._spelled(more)
            found = self._known[text, more] = self._matcher.deep_copy().try_consume_tokens(ids) == len(ids)
        return found

    def take(self, token: int) -> None:
        """Takes an answer's next token.

        Raises:
            GrammarFailed: the grammar does not have it, or has become too complex.
        """
        if not self._matcher.consume_token(token):
            raise self._failure()
        self._look()

    def _look(self) -> None:
        self.over = self._matcher.is_stopped()
        if not self.over:
            self.mask = self._next_mask()

    def _next_mask(self) -> npt.NDArray[np.int32]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        mask = np.zeros(-(-self._vocabulary // 32), dtype=np.int32)
        if self._matcher.is_error():
            # llguidance calls it a failure if no token is left
            if self._matcher.get_error().startswith("NoExtensionBias"):
                return mask
            raise self._failure()
        mask[: len(bits)] = bits[: len(mask)]
        if self._vocabulary % 32:
            mask[-1] &= (1 << self._vocabulary % 32) - 1
        if self._end is not None:
            word, bit = self._end // 32, 1 << self._end % 32
            if word < len(mask):
                mask.view(np.uint32)[word] &= ~np.uint32(bit)
            # nothing but the end is left, and no model gives it
            self.over = bool(bits.view(np.uint32)[word] & bit) and not mask.any()
        return mask

    def _failure(self) -> GrammarFailed:
        if self._matcher.stop_reason() in ("LexerTooComplex", "ParserTooComplex"):
            return GrammarFailed("the answer's grammar has become too complex to follow")
        return GrammarFailed(f"the answer's grammar has failed: {reason_of(self._matcher.get_error()) or 'it has stopped'}")


_stack_size = threading.Lock()


def with_deep_stack(work: Callable[[], Matcher]) -> Matcher:
    """Returns what `work` returns, in a thread with a stack of `STACK_BYTES`."""
    made: list[Matcher] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            made.append(work())
        except BaseException as error:
            errors.append(error)

    with _stack_size:
        # the size holds for all threads that begin from now on
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return made[0]


def grammar_of(structured: Mapping[str, Any], compiler: Any, token_id: Callable[[str], int | None]) -> str:
    """Returns a grammar in llguidance's words; `token_id` returns the added token that a text spells, if it does."""
    ((kind, value),) = structured.items()
    grammar: str
    if kind == "json":
        schema = value if isinstance(value, str) else json.dumps(value)
        if schema.strip() == "true":
            # any JSON at all: llguidance bounds white space where a schema is an object
            schema = "{}"
        grammar = compiler.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
    elif kind == "regex":
        grammar = compiler.grammar_from_regex(with_ascii_classes(value))
    elif kind == "grammar":
        written = lark_of(value) if is_gbnf(value) else value
        if written.count(":") > RULES:
            raise InvalidInput(f"the grammar cannot be used: it has {written.count(':'):,} rules (colons); may have {RULES:,}")
        grammar = compiler.grammar_from_lark(written)
    elif kind == "calls":
        grammar = compiler.grammar_from_lark(value["grammar"])
    elif kind == "structural_tag":
        grammar = compiler.grammar_from_lark(lark_of_tags(value, WHITESPACE, token_id))
    else:
        texts = " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
        grammar = compiler.grammar_from_lark(f"start: {texts}")
    return grammar


def with_ascii_classes(regex: str) -> str:
    r"""Writes the classes \d, \D, \w and \W out, with the characters that they have in a JSON schema's pattern.

    llguidance would take the digits and letters of every script.

    Example:
        >>> with_ascii_classes(r"\d+[\w-]\\d")
        '[0-9]+[[A-Za-z0-9_]-]\\\\d'
    """
    return re.sub(r"\\(.)", lambda found: CLASSES.get(found[1], found[0]), regex, flags=re.DOTALL)


def check_version(installed: str) -> None:
    """Raises InvalidInput for a version of llguidance that is older than the one due.

    Example:
        >>> check_version("1.9.1")
    """
    if tuple(int(part) for part in re.findall(r"\d+", installed)[:2]) < OLDEST:
        due = "llguidance " + ".".join(map(str, OLDEST))
        raise InvalidInput(f"the grammar needs {due} or newer, and {installed} is installed; pip install -U llguidance")


def refused(why: str) -> InvalidInput:
    """Returns the error for a grammar that cannot be used, with the reason in our words."""
    return InvalidInput(f"the grammar cannot be used: {reason_of(why)}")
