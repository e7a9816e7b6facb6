"""MiniMax: M2 has tags for the function and for each parameter, and M1 objects in a pair of tags, one in each line.

<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Kiel</parameter>
</invoke>
</minimax:tool_call>

<tool_calls>
{"name": "weather", "arguments": {"city": "Kiel"}}
</tool_calls>
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.engine.chat.tools.cursor import Reading
from rooftile.engine.chat.tools.grammar import CallForm, CallRules
from rooftile.engine.chat.tools.json_calls import read_json_call
from rooftile.engine.chat.tools.reader import CallReader
from rooftile.engine.chat.tools.syntaxes.qwen_xml import FunctionForm, FunctionReader
from rooftile.engine.chat.tools.tool import Tool


class MiniMaxReader(FunctionReader):
    """Reads functions in one pair of tags."""

    MARKS = ("<minimax:tool_call>",)
    ENDS = ("</minimax:tool_call>",)
    FUNCTION, PARAMETER, NAME_END = '<invoke name="', '<parameter name="', '">'
    FUNCTION_END, VALUE_END = "</invoke>", "</parameter>"
    INSIDE = (FUNCTION, PARAMETER, FUNCTION_END, VALUE_END)


class MiniMaxForm(FunctionForm):
    """Writes one call or several in one pair of tags, with which the answer ends."""

    marks = MiniMaxReader.MARKS
    reader = MiniMaxReader
    repeats = False

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns calls in their tags."""
        call, (begin,), (end,) = rules.rule(self.function(rules, tools)), self.reader.MARKS, self.reader.ENDS
        return f"{rules.mark(begin)} W? {call}{f' (W? {call})*' if several else ''} W? {rules.mark(end)}"


class MiniMaxM1Reader(CallReader):
    """Reads objects in one pair of tags."""

    MARKS = ("<tool_calls>",)
    ENDS = ("</tool_calls>",)

    def calls(self, mark: str) -> Reading[None]:
        """Reads objects, one after another, and the end of the pair."""
        cursor = self.cursor
        yield from cursor.skip_spaces()
        while True:
            yield from read_json_call(self)
            if not (yield from cursor.skip_behind_spaces("{")):
                break
            cursor.give_back("{")
        yield from cursor.skip_behind_spaces(*self.ENDS)


class MiniMaxM1Form(CallForm):
    """Writes one object or several in one pair of tags, with which the answer ends."""

    marks = MiniMaxM1Reader.MARKS
    repeats = False

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns objects in their tags."""
        call = rules.objects(tools)
        return f"{rules.mark('<tool_calls>')} W? {call}{f' (W? {call})*' if several else ''} W? {rules.mark('</tool_calls>')}"
