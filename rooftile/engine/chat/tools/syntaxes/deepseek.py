"""DeepSeek V3 and R1, and V3.1 in a form of its own: tokens around all calls, around each, and between a name and its arguments.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Kiel"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Kiel"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.engine.chat.tools.cursor import Reading
from rooftile.engine.chat.tools.grammar import CallRules, written
from rooftile.engine.chat.tools.syntaxes.sectioned import LONGEST_HEAD, SectionedForm, SectionedReader
from rooftile.engine.chat.tools.tool import Tool

CALLS = "<｜tool▁calls▁begin｜>"
FENCE = "```"


class DeepseekReader(SectionedReader):
    """Reads both forms; what stands between a name and its arguments tells which one it is."""

    MARKS = (CALLS,)
    CALL, BETWEEN, END_OF_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    INSIDE = (CALL, BETWEEN, END_OF_CALL)
    ENDS = ("<｜tool▁calls▁end｜>",)
    SPECIAL = frozenset(MARKS)

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._fenced = False

    def name_in(self, head: str) -> Reading[str]:
        """Returns the name; of the form with fences it stands behind the kind of thing that is called."""
        cursor = self.cursor
        self._fenced = (yield from cursor.next()) != "{"
        if not self._fenced:
            return head
        name, _ = yield from cursor.until("\n", most=LONGEST_HEAD)
        yield from cursor.skip_spaces()
        yield from cursor.expect(FENCE)
        yield from cursor.skip("json")
        yield from cursor.skip_spaces()
        return name

    def behind_arguments(self) -> Reading[None]:
        """Goes behind the fence."""
        if self._fenced:
            yield from self.cursor.skip_behind_spaces(FENCE)


class DeepseekForm(SectionedForm):
    """Writes calls of either form.

    Args:
        fenced: whether arguments are between fences, as V3 and R1 have them.
    """

    marks = DeepseekReader.MARKS
    reader = DeepseekReader

    def __init__(self, *, fenced: bool) -> None:
        self.fenced = fenced

    def call(self, rules: CallRules, tool: Tool) -> str:
        """Returns a name and arguments, between fences or bare."""
        between, arguments = rules.mark(self.reader.BETWEEN), rules.arguments(tool)
        if not self.fenced:
            return f"{written(tool.name)} {between} {arguments}"
        return f'"function" {between} {written(tool.name)} "\\n```json\\n" {arguments} "\\n```"'
