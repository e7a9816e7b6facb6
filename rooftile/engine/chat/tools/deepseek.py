"""DeepSeek V3 and R1, and V3.1 in a form of its own: tokens around all calls, around each, and between a name and its arguments.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Kiel"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Kiel"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.engine.chat.tools.cursor import Reading, Unreadable
from rooftile.engine.chat.tools.grammar import CallForm, CallRules, written
from rooftile.engine.chat.tools.json_calls import read_arguments
from rooftile.engine.chat.tools.reader import CallReader
from rooftile.engine.chat.tools.tool import Tool

CALLS, CALL, BETWEEN = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
END_OF_CALL, END_OF_CALLS = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
FENCE = "```"


class DeepseekReader(CallReader):
    """Reads both forms; what stands between a name and its arguments tells which one it is."""

    MARKS = (CALLS,)
    INSIDE = (CALL, BETWEEN, END_OF_CALL)
    ENDS = (END_OF_CALLS,)
    SPECIAL = frozenset((CALLS,))

    def calls(self, mark: str) -> Reading[None]:
        """Reads calls up to the end of all of them."""
        cursor = self.cursor
        yield from cursor.skip_spaces()
        yield from cursor.expect(CALL)
        while True:
            yield from self._call()
            if not (yield from cursor.skip_behind_spaces(CALL)):
                break
        yield from cursor.skip_behind_spaces(END_OF_CALLS)

    def _call(self) -> Reading[None]:
        cursor = self.cursor
        name, _ = yield from cursor.until(BETWEEN, most=80)
        yield from cursor.skip_spaces()
        fenced = (yield from cursor.next()) != "{"
        if fenced:
            # the first word is the kind of thing that is called
            name, _ = yield from cursor.until("\n", most=80)
            yield from cursor.skip_spaces()
            yield from cursor.expect(FENCE)
            yield from cursor.skip("json")
            yield from cursor.skip_spaces()
        yield self.start(name.strip())
        yield from read_arguments(self)
        if fenced:
            yield from cursor.skip_behind_spaces(FENCE)
        if not (yield from cursor.skip_behind_spaces(END_OF_CALL)) and (yield from cursor.next()):
            raise Unreadable(f"{cursor.text[:1]!r} stands where {END_OF_CALL!r} is due")
        yield self.end()


class DeepseekForm(CallForm):
    """Writes calls, with which the answer ends.

    Args:
        fenced: whether arguments are between fences, as V3 and R1 have them.
    """

    marks = DeepseekReader.MARKS
    repeats = False

    def __init__(self, *, fenced: bool) -> None:
        self.fenced = fenced

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns one call or several between the tokens around all of them."""
        each = " | ".join(rules.rule(self._call(rules, tool)) for tool in tools)
        call = rules.rule(f"{rules.mark(CALL)} ({each}) {rules.mark(END_OF_CALL)}")
        calls = f"{call} (W? {call})*" if several else call
        return f"{rules.mark(CALLS)} W? {calls} W? {rules.mark(END_OF_CALLS)}"

    def _call(self, rules: CallRules, tool: Tool) -> str:
        between, arguments = rules.mark(BETWEEN), rules.arguments(tool)
        if not self.fenced:
            return f"{written(tool.name)} {between} {arguments}"
        return f'"function" {between} {written(tool.name)} "\\n```json\\n" {arguments} "\\n```"'
