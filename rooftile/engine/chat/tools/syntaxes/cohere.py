"""Command R7B, Command A and later ones of Cohere: a list of objects between two tokens.

<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Kiel"}}
]<|END_ACTION|>
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.engine.chat.tools.cursor import Reading
from rooftile.engine.chat.tools.grammar import CallForm, CallRules
from rooftile.engine.chat.tools.json_calls import CallKeys, read_json_calls
from rooftile.engine.chat.tools.reader import CallReader
from rooftile.engine.chat.tools.tool import Tool

KEYS = CallKeys("tool_name", ("parameters",), ("tool_call_id",))


class CohereReader(CallReader):
    """Reads a list between the tokens, or a single object."""

    MARKS = ("<|START_ACTION|>",)
    ENDS = ("<|END_ACTION|>",)
    SPECIAL = frozenset(MARKS)

    def calls(self, mark: str) -> Reading[None]:
        """Reads the list."""
        yield from read_json_calls(self, keys=KEYS)
        yield from self.cursor.skip_behind_spaces(*self.ENDS)


class CohereForm(CallForm):
    """Writes a list, with which the answer ends; each object may have an id."""

    marks = CohereReader.MARKS
    repeats = False

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns a list between the tokens."""
        id = '"\\"tool_call_id\\"" W? ":" W? /"[0-9a-zA-Z_-]{1,64}"/ W? "," W?'
        call = rules.objects(tools, name=KEYS.name, arguments=KEYS.arguments[0], first=id)
        return f"{rules.mark('<|START_ACTION|>')} W? {rules.listed(call, several=several)} W? {rules.mark('<|END_ACTION|>')}"
