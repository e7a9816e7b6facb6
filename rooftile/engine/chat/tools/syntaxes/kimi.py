"""Kimi K2: tokens around all calls, around each, and between an id, which has the name and a number, and the arguments.

<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Kiel"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.engine.chat.tools.cursor import Reading
from rooftile.engine.chat.tools.grammar import CallRules, written
from rooftile.engine.chat.tools.syntaxes.sectioned import SectionedForm, SectionedReader
from rooftile.engine.chat.tools.tool import Tool

SECTION, CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"


class KimiReader(SectionedReader):
    """Reads calls in a section, and by themselves: models leave its beginning out at times."""

    MARKS = (SECTION, CALL)
    CALL, BETWEEN, END_OF_CALL = CALL, "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    INSIDE = (BETWEEN, END_OF_CALL)
    ENDS = ("<|tool_calls_section_end|>",)
    SPECIAL = frozenset(MARKS)

    def name_in(self, head: str) -> Reading[str]:
        """Returns the name in an id."""
        yield from ()
        name, colon, number = head.strip().removeprefix("functions.").rpartition(":")
        return name if colon and number.isdecimal() else head


class KimiForm(SectionedForm):
    """Writes calls in a section, or by themselves."""

    marks = KimiReader.MARKS
    reader = KimiReader

    def call(self, rules: CallRules, tool: Tool) -> str:
        """Returns an id and arguments."""
        return f"{written(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {rules.mark(self.reader.BETWEEN)} {rules.arguments(tool)}"

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns calls, in a section or by themselves."""
        calls, end = rules.rule(self.calls(rules, tools, several=several)), rules.mark(self.reader.ENDS[0])
        return f"{rules.mark(SECTION)} W? {calls} W? {end} | {calls}"
