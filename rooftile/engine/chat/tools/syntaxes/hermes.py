"""Hermes 2 and 3, Qwen 2.5 and 3, Granite 4, SmolLM3: each call is an object in a pair of tags.

<tool_call>
{"name": "weather", "arguments": {"city": "Kiel"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.engine.chat.tools.cursor import Reading
from rooftile.engine.chat.tools.grammar import CallForm, CallRules
from rooftile.engine.chat.tools.json_calls import read_json_calls
from rooftile.engine.chat.tools.reader import CallReader
from rooftile.engine.chat.tools.tool import Tool


class HermesReader(CallReader):
    """Reads calls in tags; a list of objects in one pair is taken, too."""

    MARKS = ("<tool_call>",)
    ENDS = ("</tool_call>",)

    def calls(self, mark: str) -> Reading[None]:
        """Reads what stands in a pair of tags."""
        yield from read_json_calls(self)
        yield from self.cursor.skip_behind_spaces("</tool_call>")


class HermesForm(CallForm):
    """Writes one object in a pair of tags."""

    marks = HermesReader.MARKS

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns a call in its tags."""
        return f"{rules.mark('<tool_call>')} W? {rules.objects(tools)} W? {rules.mark('</tool_call>')}"
