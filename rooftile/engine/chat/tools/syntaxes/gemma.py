"""Gemma 4: a name, and entries in braces, whose texts stand between two tokens as they are.

<|tool_call>call:weather{city:<|"|>Kiel<|"|>,days:2}<tool_call|>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rooftile.engine.chat.tools.cursor import SPACES, Cursor, Reading, Unreadable
from rooftile.engine.chat.tools.grammar import CallForm, CallRules, written
from rooftile.engine.chat.tools.json_calls import LONGEST_VALUE, pass_on_text
from rooftile.engine.chat.tools.reader import CallReader
from rooftile.engine.chat.tools.schema_types import resolved
from rooftile.engine.chat.tools.syntaxes.literal_rules import LiteralRules
from rooftile.engine.chat.tools.tool import Tool

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
# templates write None, too
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
# characters of a name and its brace, or of a key and its colon
LONGEST_NAME = 80
DEEPEST = 64


class GemmaReader(CallReader):
    """Reads calls, one after another. Texts are passed on as they come, and other arguments when they are whole."""

    MARKS = (BEGIN,)
    ENDS = (END,)
    INSIDE = (QUOTE,)
    SPECIAL = frozenset(MARKS)

    def calls(self, mark: str) -> Reading[None]:
        """Reads one call."""
        cursor = self.cursor
        yield from cursor.skip_spaces()
        yield from cursor.expect("call:")
        name, _ = yield from cursor.until("{", most=LONGEST_NAME)
        yield self.start(name.strip())
        seen = set[str]()
        while True:
            yield from cursor.skip_spaces()
            if (yield from cursor.skip("}")):
                break
            if seen:
                yield from cursor.expect(",")
                yield from cursor.skip_spaces()
            key = yield from _read_key(cursor)
            if not key or key in seen:
                raise Unreadable(f"{key[:40]!r} is no name of a parameter, or stands twice")
            yield self.arguments(f"{', ' if seen else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            seen.add(key)
            yield from cursor.skip_spaces()
            if (yield from cursor.skip(QUOTE)):
                yield from pass_on_text(self, QUOTE)
            else:
                yield self.arguments(json.dumps((yield from _read_value(cursor)), ensure_ascii=False))
        yield self.arguments("}" if seen else "{}")
        yield self.end()
        yield from cursor.skip_behind_spaces(END)


def _read_key(cursor: Cursor) -> Reading[str]:
    """Returns a key, which may stand between the tokens, and goes behind its colon."""
    if (yield from cursor.skip(QUOTE)):
        key, _ = yield from cursor.until(QUOTE)
        yield from cursor.skip_spaces()
        yield from cursor.expect(":")
        return key
    key, _ = yield from cursor.until(":", most=LONGEST_NAME)
    return key.strip()


def _read_value(cursor: Cursor, level: int = 0) -> Reading[Any]:
    """Returns a value, and goes behind it.

    Raises:
        Unreadable: it is none.
    """
    if level > DEEPEST:
        raise Unreadable(f"a value has more than {DEEPEST} levels")
    yield from cursor.skip_spaces()
    if (yield from cursor.skip(QUOTE)):
        text, _ = yield from cursor.until(QUOTE, most=LONGEST_VALUE)
        return text
    if (yield from cursor.skip("[")):
        items: list[Any] = []
        while not (yield from cursor.skip_behind_spaces("]")):
            if items:
                yield from cursor.skip_spaces()
                yield from cursor.expect(",")
            items.append((yield from _read_value(cursor, level + 1)))
        return items
    if (yield from cursor.skip("{")):
        entries: dict[str, Any] = {}
        while not (yield from cursor.skip_behind_spaces("}")):
            yield from cursor.skip_spaces()
            if entries:
                yield from cursor.expect(",")
                yield from cursor.skip_spaces()
            key = yield from _read_key(cursor)
            entries[key] = yield from _read_value(cursor, level + 1)
        return entries
    word = ""
    while (following := (yield from cursor.next())) and following not in ",]}" + SPACES and len(word) <= LONGEST_NAME:
        word += cursor.take(1)
    return _plain_value(word)


def _plain_value(word: str) -> Any:
    """Returns the number or the constant that a word is."""
    if word in _WORDS:
        return _WORDS[word]
    try:
        found = json.loads(word, parse_constant=_refuse)
    except ValueError:
        found = None
    # 1e999 is infinite
    if not isinstance(found, int | float) or isinstance(found, bool) or found - found != 0:
        raise Unreadable(f"{word[:40]!r} is no value")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


class GemmaRules(LiteralRules):
    """Rules of Gemma's values."""

    BOUNDS = ("maxLength", "maxItems", "minItems")
    BOOLEAN, NULL = '"true" | "false"', '"null" | "None"'

    def text(self, least: int | None, most: int | None) -> str:
        """Returns a text between the tokens."""
        if most is not None:
            return self._between(most)
        name = "any_text"
        return name if self._rules.has(name) else self._rules.rule(self._between(None), name=name)

    def constant(self, value: Any) -> str:
        """Returns a value."""
        if isinstance(value, str):
            quote = self._rules.mark(QUOTE)
            return f"{quote} {written(value)} {quote}" if value else f"{quote} {quote}"
        if isinstance(value, list):
            items = ' W? "," W? '.join(f"({self.constant(each)})" for each in value)
            return f'"[" W? {items} W? "]"'
        if isinstance(value, Mapping):
            entries = ' W? "," W? '.join(f'{self.key(key)} ":" ({self.constant(each)})' for key, each in value.items())
            return f'"{{" W? {entries} W? "}}"'
        return self.NULL if value is None else written(json.dumps(value))

    def key(self, name: str | None) -> str:
        """Returns a bare name."""
        return "/[a-zA-Z0-9_.-]{1,64}/" if name is None else written(name)

    def _between(self, most: int | None) -> str:
        return f"{self._rules.mark(QUOTE)} {self._rules.up_to(QUOTE, most)}"


class GemmaForm(CallForm):
    """Writes a call; parameters are in the order of the schema."""

    marks = GemmaReader.MARKS

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns a call in its tokens."""
        each = " | ".join(rules.rule(self._call(rules, tool)) for tool in tools)
        return f'{rules.mark(BEGIN)} "call:" ({each}) {rules.mark(END)}'

    def _call(self, rules: CallRules, tool: Tool) -> str:
        root = rules.parameters(tool)
        schema = resolved(root, root)
        if schema.get("properties"):
            rules.check_strict(tool, schema, GemmaRules.BOUNDS)
        return f"{written(tool.name)} {GemmaRules(rules, root).map(schema)}"
