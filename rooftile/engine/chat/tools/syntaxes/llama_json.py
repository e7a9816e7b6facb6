"""Llama 3: an answer that is a call is one object, with or without a special token before it.

<|python_tag|>{"name": "weather", "parameters": {"city": "Kiel"}}
{"type": "function", "name": "weather", "parameters": {"city": "Kiel"}}; {"name": ...
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.engine.chat.tools.cursor import Reading
from rooftile.engine.chat.tools.grammar import CallForm, CallRules
from rooftile.engine.chat.tools.json_calls import read_json_call
from rooftile.engine.chat.tools.reader import CallReader
from rooftile.engine.chat.tools.tool import Tool


class LlamaJsonReader(CallReader):
    """Reads calls behind the token, and at the beginning of an answer: there only if they name a function that was given."""

    MARKS = ("<|python_tag|>",)
    SPECIAL = frozenset(MARKS)

    def begin_without_mark(self) -> Reading[bool]:
        """Tells whether the answer begins with an object."""
        return (yield from self.cursor.next()) == "{"

    def calls(self, mark: str) -> Reading[None]:
        """Reads objects with semicolons between them."""
        known = None if mark else self.tools
        yield from self.cursor.skip_spaces()
        yield from read_json_call(self, known)
        while (yield from self.cursor.skip_behind_spaces(";")):
            yield from self.cursor.skip_spaces()
            yield from read_json_call(self, known)


class LlamaJsonForm(CallForm):
    """Writes one object, which is the whole answer, as the templates of these models have it."""

    anchors = LlamaJsonReader.MARKS
    repeats = False

    def openings(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Returns the beginnings of objects with the functions' names: another object is an answer like any other."""
        heads = ('{"name":', '{"type":"function","name":')
        return tuple(f'{head}"{tool.name}"' for head in heads for tool in tools)

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns a call, with a type or without."""
        return rules.objects(tools, arguments="parameters", first=r'"\"type\"" W? ":" W? "\"function\"" W? "," W?')
