"""Calls between tokens: around all of them, around each, and between a function's name and its arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from rooftile.engine.chat.tools.cursor import Reading, Unreadable
from rooftile.engine.chat.tools.grammar import CallForm, CallRules
from rooftile.engine.chat.tools.json_calls import read_arguments
from rooftile.engine.chat.tools.reader import CallReader
from rooftile.engine.chat.tools.tool import Tool

# characters before the token that follows a name
LONGEST_HEAD = 80


class SectionedReader(CallReader):
    """Reads calls between tokens; `MARKS` begins with the token before all of them, `ENDS` has the one behind."""

    CALL = ""
    """The token before a call."""
    BETWEEN = ""
    """The token between a name and what follows it."""
    END_OF_CALL = ""
    """The token behind a call."""

    def calls(self, mark: str) -> Reading[None]:
        """Reads calls up to the end of all of them."""
        cursor = self.cursor
        if mark != self.CALL:
            yield from cursor.skip_spaces()
            yield from cursor.expect(self.CALL)
        while True:
            yield from self._call()
            if not (yield from cursor.skip_behind_spaces(self.CALL)):
                break
        # some answers have it twice
        while (yield from cursor.skip_behind_spaces(*self.ENDS)):
            pass

    @abstractmethod
    def name_in(self, head: str) -> Reading[str]:
        """Returns the function's name, by what stands before `BETWEEN`, and goes on to the arguments."""

    def behind_arguments(self) -> Reading[None]:
        """Goes behind what a syntax has between the arguments and the end of a call."""
        yield from ()

    def _call(self) -> Reading[None]:
        cursor = self.cursor
        head, _ = yield from cursor.until(self.BETWEEN, most=LONGEST_HEAD)
        yield from cursor.skip_spaces()
        name = yield from self.name_in(head)
        yield self.start(name.strip())
        yield from read_arguments(self)
        yield from self.behind_arguments()
        if not (yield from cursor.skip_behind_spaces(self.END_OF_CALL)) and (yield from cursor.next()):
            raise Unreadable(f"{cursor.text[:1]!r} stands where {self.END_OF_CALL!r} is due")
        yield self.end()


class SectionedForm(CallForm):
    """Writes one call or several between the tokens around all of them, with which the answer ends."""

    reader: type[SectionedReader]
    repeats = False

    @abstractmethod
    def call(self, rules: CallRules, tool: Tool) -> str:
        """Returns what stands between the tokens around a call of a function."""

    def calls(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns one call or several, each in its tokens."""
        each = " | ".join(rules.rule(self.call(rules, tool)) for tool in tools)
        call = rules.rule(f"{rules.mark(self.reader.CALL)} ({each}) {rules.mark(self.reader.END_OF_CALL)}")
        return f"{call} (W? {call})*" if several else call

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns calls in the tokens around all of them."""
        begin, end = self.reader.MARKS[0], self.reader.ENDS[0]
        return f"{rules.mark(begin)} W? {self.calls(rules, tools, several=several)} W? {rules.mark(end)}"
