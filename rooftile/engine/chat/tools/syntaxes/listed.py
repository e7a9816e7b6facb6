"""Granite 3, and Phi-4-mini and Firefunction: a mark, and then a list of objects.

<|tool_call|>[{"name": "weather", "arguments": {"city": "Kiel"}}]
functools[{"name": "weather", "arguments": {"city": "Kiel"}}]
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.engine.chat.tools.cursor import Reading
from rooftile.engine.chat.tools.grammar import CallForm, CallRules, written
from rooftile.engine.chat.tools.json_calls import read_json_calls
from rooftile.engine.chat.tools.reader import CallReader
from rooftile.engine.chat.tools.tool import Tool


class GraniteReader(CallReader):
    """Reads a list behind the token, or behind the tag that Granite 3.0 writes."""

    MARKS = ("<|tool_call|>", "<tool_call>")
    SPECIAL = frozenset(("<|tool_call|>",))

    def calls(self, mark: str) -> Reading[None]:
        """Reads the list."""
        yield from read_json_calls(self)


class GraniteForm(CallForm):
    """Writes a list, with which the answer ends."""

    marks = GraniteReader.MARKS
    repeats = False

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns a list behind one of the marks."""
        begin = " | ".join(rules.mark(mark) for mark in self.marks)
        return f"({begin}) W? {rules.listed(rules.objects(tools), several=several)}"


class PhiReader(CallReader):
    """Reads a list behind the word, or between the tokens that Phi-4-mini has."""

    MARKS = ("functools[", "<|tool_call|>")
    ENDS = ("<|/tool_call|>",)
    SPECIAL = frozenset(("<|tool_call|>",))

    def calls(self, mark: str) -> Reading[None]:
        """Reads the list."""
        yield from read_json_calls(self, in_list=mark.endswith("["))
        yield from self.cursor.skip_behind_spaces("<|/tool_call|>")


class PhiForm(CallForm):
    """Writes a list, with which the answer ends."""

    marks = PhiReader.MARKS
    repeats = False

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns a list behind the word, or between the tokens."""
        calls = rules.rule(rules.listed(rules.objects(tools), several=several))
        tokens = f"{rules.mark('<|tool_call|>')} W? {calls} W? {rules.mark('<|/tool_call|>')}"
        return f"{written('functools')} {calls} | {tokens}"
