"""GLM 4.5 to 4.7 and models alike: a name, and tags for the key and the value of each argument.

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Kiel</arg_value>
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.engine.chat.tools.cursor import Reading
from rooftile.engine.chat.tools.grammar import CallRules, written
from rooftile.engine.chat.tools.syntaxes.tagged import TaggedForm, TaggedReader
from rooftile.engine.chat.tools.tool import Tool

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, END_OF_KEY, VALUE = "<arg_key>", "</arg_key>", "<arg_value>"


class GlmReader(TaggedReader):
    """Reads calls with white space between the tags, or without."""

    MARKS = (BEGIN,)
    VALUE_END = "</arg_value>"
    INSIDE = (KEY, END_OF_KEY, VALUE, VALUE_END)
    ENDS = (END,)

    def calls(self, mark: str) -> Reading[None]:
        """Reads one call."""
        cursor = self.cursor
        yield from cursor.skip_spaces()
        name, word = yield from cursor.until("\n", KEY, END, most=80)
        yield from self.begin_call(name)
        if word == "\n":
            yield from cursor.skip_spaces()
            word = yield from cursor.expect(KEY, END)
        while word == KEY:
            key, _ = yield from cursor.until(END_OF_KEY)
            yield from cursor.skip_spaces()
            yield from cursor.expect(VALUE)
            yield from self.parameter(key.strip())
            yield from cursor.skip_spaces()
            word = yield from cursor.expect(KEY, END)
        yield from self.end_call()


class GlmForm(TaggedForm):
    """Writes a call."""

    marks = GlmReader.MARKS
    reader = GlmReader

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns a call."""
        each = [f"{written(tool.name)} W? {self.parameters(rules, tool)}" for tool in tools]
        return f"{rules.mark(BEGIN)} W? ({' | '.join(map(rules.rule, each))}) {rules.mark(END)}"

    def before_value(self, rules: CallRules, key: str) -> str:
        """Returns a key, and the tag that begins its value."""
        return f"{rules.mark(KEY)} {key} {rules.mark(END_OF_KEY)} W? {rules.mark(VALUE)}"
