"""Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5: tags for the function and for each parameter, whose text is a string or JSON.

<tool_call>
<function=weather>
<parameter=city>
Kiel
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.engine.chat.tools.cursor import Reading
from rooftile.engine.chat.tools.grammar import CallRules, written
from rooftile.engine.chat.tools.tagged import TaggedForm, TaggedReader
from rooftile.engine.chat.tools.tool import Tool

FUNCTION, PARAMETER = "<function=", "<parameter="
END_OF_FUNCTION = "</function>"


class QwenXmlReader(TaggedReader):
    """Reads calls in tags; models leave the outer pair out at times."""

    MARKS = ("<tool_call>", FUNCTION)
    VALUE_END = "</parameter>"
    OWN_LINES = True
    INSIDE = (PARAMETER, VALUE_END, END_OF_FUNCTION)
    ENDS = ("</tool_call>",)

    def calls(self, mark: str) -> Reading[None]:
        """Reads functions, one after another, and the end of the outer pair."""
        cursor = self.cursor
        if mark != FUNCTION:
            yield from cursor.skip_spaces()
            yield from cursor.expect(FUNCTION)
        while True:
            name, _ = yield from cursor.until(">", most=80)
            yield from self.begin_call(name)
            yield from cursor.skip_spaces()
            while (yield from cursor.expect(PARAMETER, END_OF_FUNCTION)) == PARAMETER:
                key, _ = yield from cursor.until(">")
                yield from self.parameter(key)
                yield from cursor.skip_spaces()
            yield from self.end_call()
            if not (yield from cursor.skip_behind_spaces(FUNCTION)):
                break
        yield from cursor.skip_behind_spaces("</tool_call>")


class QwenXmlForm(TaggedForm):
    """Writes a call in its tags, with the outer pair or without."""

    marks = QwenXmlReader.MARKS
    reader = QwenXmlReader

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns a call."""
        each = [f"{written(tool.name + '>')} W? {self.parameters(rules, tool)}" for tool in tools]
        call = rules.rule(f"{written(FUNCTION)} ({' | '.join(map(rules.rule, each))}) {written(END_OF_FUNCTION)}")
        return f"{rules.mark('<tool_call>')} W? {call} W? {rules.mark('</tool_call>')} | {call}"

    def before_value(self, rules: CallRules, key: str) -> str:
        """Returns the tag that begins a parameter."""
        return f'{written(PARAMETER)} {key} ">"'
