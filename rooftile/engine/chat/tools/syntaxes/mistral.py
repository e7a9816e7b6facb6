"""Mistral: a special token, and then a list of objects, or since 2025 one function's name with its arguments.

[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Kiel"}, "id": "Ab3dE6gHi"}]
[TOOL_CALLS]weather[ARGS]{"city": "Kiel"}
[TOOL_CALLS]weather[CALL_ID]Ab3dE6gHi[ARGS]{"city": "Kiel"}
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.engine.chat.tools.cursor import Reading
from rooftile.engine.chat.tools.grammar import CallForm, CallRules, written
from rooftile.engine.chat.tools.json_calls import read_arguments, read_json_calls
from rooftile.engine.chat.tools.reader import CallReader
from rooftile.engine.chat.tools.tool import Tool


class MistralReader(CallReader):
    """Reads both forms."""

    MARKS = ("[TOOL_CALLS]",)
    SPECIAL = frozenset(MARKS)
    INSIDE = ("[ARGS]", "[CALL_ID]")

    def calls(self, mark: str) -> Reading[None]:
        """Reads what stands behind one token."""
        cursor = self.cursor
        yield from cursor.skip_spaces()
        if (yield from cursor.next()) in ("[", "{"):
            yield from read_json_calls(self)
            return
        name, word = yield from cursor.until("[ARGS]", "[CALL_ID]", "{", most=80)
        if word == "[CALL_ID]":
            _, word = yield from cursor.until("[ARGS]", "{", most=80)
        if word == "{":
            cursor.give_back(word)
        yield self.start(name.strip())
        yield from cursor.skip_spaces()
        yield from read_arguments(self)
        yield self.end()


# an id, as templates take it
_ID = "[a-zA-Z0-9]{9}"


class MistralListForm(CallForm):
    """Writes a list of objects behind the token; each may have an id."""

    marks = MistralReader.MARKS
    repeats = False

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns a list."""
        id = f'"," W? "\\"id\\"" W? ":" W? /"{_ID}"/ W?'
        return f"{rules.mark('[TOOL_CALLS]')} W? {rules.listed(rules.objects(tools, more=id), several=several)}"


class MistralNamedForm(CallForm):
    """Writes a name and arguments behind each token.

    Args:
        has_ids: whether an id may stand between the two.
    """

    marks = MistralReader.MARKS

    def __init__(self, *, has_ids: bool = False) -> None:
        self.has_ids = has_ids

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns a call."""
        id = f"({rules.mark('[CALL_ID]')} /{_ID}/)?" if self.has_ids else ""
        calls = " | ".join(
            rules.rule(f"{written(tool.name)} {id} {rules.mark('[ARGS]')} W? {rules.arguments(tool)}") for tool in tools
        )
        return f"{rules.mark('[TOOL_CALLS]')} W? ({calls})"
