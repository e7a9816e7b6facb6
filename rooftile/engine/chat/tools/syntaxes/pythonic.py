"""Llama 3.2 and 4, LFM2: a list of calls as Python writes them, which is the whole answer or stands between two tokens.

[weather(city="Kiel", days=2), add(a=1)]
<|tool_call_start|>[weather(city="Kiel")]<|tool_call_end|>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rooftile.engine.chat.tools.cursor import Reading, Unreadable
from rooftile.engine.chat.tools.grammar import CallForm, CallRules, written
from rooftile.engine.chat.tools.reader import CallReader
from rooftile.engine.chat.tools.schema_types import resolved
from rooftile.engine.chat.tools.syntaxes.python_rules import PythonRules
from rooftile.engine.chat.tools.syntaxes.python_values import read_python_value
from rooftile.engine.chat.tools.tool import NAME, Tool

_PAIRS = (("<|tool_call_start|>", "<|tool_call_end|>"), ("<|python_start|>", "<|python_end|>"))
# characters of a name and its bracket, or of a parameter and its sign
LONGEST_NAME = 80


class PythonicReader(CallReader):
    """Reads a list behind a token, and at the beginning of an answer: there only if it names a function that was given."""

    MARKS = tuple(begin for begin, _ in _PAIRS)
    ENDS = tuple(end for _, end in _PAIRS)
    SPECIAL = frozenset(MARKS)

    def begin_without_mark(self) -> Reading[bool]:
        """Tells whether the answer begins with a list."""
        return (yield from self.cursor.next()) == "["

    def calls(self, mark: str) -> Reading[None]:
        """Reads a list of calls."""
        cursor = self.cursor
        yield from cursor.skip_spaces()
        yield from cursor.expect("[")
        while True:
            yield from cursor.skip_spaces()
            yield from self._call(known_only=not mark)
            if not (yield from cursor.skip_behind_spaces(",")):
                break
        yield from cursor.skip_behind_spaces("]")
        if mark:
            yield from cursor.skip_behind_spaces(*self.ENDS)

    def _call(self, *, known_only: bool) -> Reading[None]:
        cursor = self.cursor
        name, _ = yield from cursor.until("(", most=LONGEST_NAME)
        yield self.start(name.strip(), self.tools if known_only else None)
        seen = set[str]()
        while True:
            yield from cursor.skip_spaces()
            if (yield from cursor.skip(")")):
                break
            if seen:
                yield from cursor.expect(",")
                yield from cursor.skip_spaces()
            key, _ = yield from cursor.until("=", most=LONGEST_NAME)
            key = key.strip()
            if NAME.fullmatch(key) is None or key in seen:
                raise Unreadable(f"{key[:40]!r} is no name of a parameter, or stands twice")
            yield self.arguments(f"{', ' if seen else '{'}{json.dumps(key)}: ")
            seen.add(key)
            yield from cursor.skip_spaces()
            yield self.arguments((yield from read_python_value(cursor)))
        yield self.arguments("}" if seen else "{}")
        yield self.end()


class PythonicForm(CallForm):
    """Writes a list, with which the answer ends; parameters are in the order of the schema."""

    marks = PythonicReader.MARKS
    repeats = False

    def openings(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Returns the beginnings of lists whose first call is of one of the functions."""
        return tuple(f"[{tool.name}(" for tool in tools)

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns a list, by itself or between the tokens."""
        call = rules.rule(" | ".join(rules.rule(self._call(rules, tool)) for tool in tools))
        calls = rules.rule(rules.listed(call, several=several))
        between = [f"{rules.mark(begin)} W? {calls} W? {rules.mark(end)}" for begin, end in _PAIRS]
        return " | ".join([calls, *between])

    def _call(self, rules: CallRules, tool: Tool) -> str:
        root = rules.parameters(tool)
        schema = resolved(root, root)
        properties, required = schema.get("properties"), schema.get("required")
        values = PythonRules(rules, root)
        parameters: list[tuple[str, bool]] = []
        if isinstance(properties, Mapping) and properties:
            rules.check_strict(tool, schema, PythonRules.BOUNDS)
            for key, each in properties.items():
                one = rules.rule(f'{written(key)} W? "=" W? {values.value(each)}')
                parameters.append((one, isinstance(required, list) and key in required))
        elif schema.get("additionalProperties") is not False:
            one = rules.rule(f'/[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/ W? "=" W? {values.value({})}')
            return f'{written(tool.name)} "(" W? ({one} (W? "," W? {one})*)? W? ")"'
        return f'{written(tool.name)} "(" W? {rules.sequence(parameters)} W? ")"'
