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
from rooftile.engine.chat.tools.syntaxes.tagged import TaggedForm, TaggedReader
from rooftile.engine.chat.tools.tool import Tool


class FunctionReader(TaggedReader):
    """Reads functions in tags, whose parameters are in tags of their own; `MARKS` begins with the outer pair's first tag."""

    FUNCTION, PARAMETER, NAME_END = "<function=", "<parameter=", ">"
    """The tags of a function and of a parameter, up to their names, and what ends a name."""
    FUNCTION_END = "</function>"
    """The tag that ends a function."""

    def calls(self, mark: str) -> Reading[None]:
        """Reads functions, one after another, and the end of the outer pair."""
        cursor = self.cursor
        if mark != self.FUNCTION:
            yield from cursor.skip_spaces()
            yield from cursor.expect(self.FUNCTION)
        while True:
            name, _ = yield from cursor.until(self.NAME_END, most=80)
            yield from self.begin_call(name)
            yield from cursor.skip_spaces()
            while (yield from cursor.expect(self.PARAMETER, self.FUNCTION_END)) == self.PARAMETER:
                key, _ = yield from cursor.until(self.NAME_END)
                yield from self.parameter(key)
                yield from cursor.skip_spaces()
            yield from self.end_call()
            if not (yield from cursor.skip_behind_spaces(self.FUNCTION)):
                break
        yield from cursor.skip_behind_spaces(*self.ENDS)


class FunctionForm(TaggedForm):
    """Writes functions in such tags."""

    reader: type[FunctionReader]

    def function(self, rules: CallRules, tools: Sequence[Tool]) -> str:
        """Returns one of some functions in its tags."""
        each = [f"{written(tool.name + self.reader.NAME_END)} W? {self.parameters(rules, tool)}" for tool in tools]
        return f"{written(self.reader.FUNCTION)} ({' | '.join(map(rules.rule, each))}) {written(self.reader.FUNCTION_END)}"

    def before_value(self, rules: CallRules, key: str) -> str:
        """Returns the tag that begins a parameter."""
        return f"{written(self.reader.PARAMETER)} {key} {written(self.reader.NAME_END)}"


class QwenXmlReader(FunctionReader):
    """Reads calls in tags; models leave the outer pair out at times."""

    MARKS = ("<tool_call>", FunctionReader.FUNCTION)
    VALUE_END = "</parameter>"
    OWN_LINES = True
    INSIDE = (FunctionReader.PARAMETER, VALUE_END, FunctionReader.FUNCTION_END)
    ENDS = ("</tool_call>",)


class QwenXmlForm(FunctionForm):
    """Writes a call in its tags, with the outer pair or without."""

    marks = QwenXmlReader.MARKS
    reader = QwenXmlReader

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns a call."""
        call = rules.rule(self.function(rules, tools))
        return f"{rules.mark('<tool_call>')} W? {call} W? {rules.mark('</tool_call>')} | {call}"
