"""Mistral: a special token, and then a list of objects, or since 2025 one function's name with its arguments.

[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Kiel"}, "id": "Ab3dE6gHi"}]
[TOOL_CALLS]weather[ARGS]{"city": "Kiel"}
[TOOL_CALLS]weather[CALL_ID]Ab3dE6gHi[ARGS]{"city": "Kiel"}
"""

from __future__ import annotations

from rooftile.engine.chat.tools.cursor import Reading
from rooftile.engine.chat.tools.json_calls import read_arguments, read_json_calls
from rooftile.engine.chat.tools.reader import CallReader


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
