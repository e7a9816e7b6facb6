"""Calls whose arguments stand in tags, one by one: strings as they are, and all else as JSON."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rooftile.engine.chat.tools.cursor import Reading, Unreadable
from rooftile.engine.chat.tools.grammar import CallForm, CallRules, written
from rooftile.engine.chat.tools.json_calls import LONGEST_VALUE, pass_on_text
from rooftile.engine.chat.tools.reader import CallReader
from rooftile.engine.chat.tools.schema_types import constants_of, counted, resolved, takes_text, types_of, value_of
from rooftile.engine.chat.tools.tool import Tool

STRING: Mapping[str, Any] = {"type": "string"}


class TaggedReader(CallReader):
    """Reads arguments in tags. Strings are passed on as they come."""

    VALUE_END = ""
    """The tag that ends a value."""
    OWN_LINES = False
    """Whether a value stands in lines of its own."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        # the schema of the function that is being called, and its arguments so far
        self._root: Mapping[str, Any] = {}
        self._seen = set[str]()

    def begin_call(self, name: str) -> Reading[None]:
        """Begins a call."""
        yield self.start(name.strip())
        tool = self.tools.get(name.strip())
        self._root, self._seen = {} if tool is None else tool.parameters, set()

    def parameter(self, key: str) -> Reading[None]:
        """Reads a value and the tag that ends it."""
        if key in self._seen:
            raise Unreadable(f"the parameter {key[:40]!r} stands twice")
        yield self.arguments(f"{', ' if self._seen else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._seen.add(key)
        properties = resolved(self._root, self._root).get("properties")
        # a parameter that the function does not have is a string
        schema = properties.get(key, STRING) if isinstance(properties, Mapping) else STRING
        if self.OWN_LINES:
            yield from self.cursor.skip("\n")
        if types_of(schema, self._root) == {"string"}:
            ends = ("\n" + self.VALUE_END,) if self.OWN_LINES else ()
            yield from pass_on_text(self, *ends, self.VALUE_END)
        else:
            text, _ = yield from self.cursor.until(self.VALUE_END, most=LONGEST_VALUE)
            yield self.arguments(value_of(text.removesuffix("\n") if self.OWN_LINES else text, schema, self._root))

    def end_call(self) -> Reading[None]:
        """Ends the call."""
        yield self.arguments("}" if self._seen else "{}")
        yield self.end()


class TaggedForm(CallForm):
    """Writes a function's required parameters, and those others that the model wants, in the order of the schema."""

    reader: type[TaggedReader]

    @abstractmethod
    def before_value(self, rules: CallRules, key: str) -> str:
        """Returns what stands before the value of a parameter whose name is given in Lark's form."""

    def parameters(self, rules: CallRules, tool: Tool) -> str:
        """Returns a function's parameters."""
        root = rules.parameters(tool)
        schema = resolved(root, root)
        properties, required = schema.get("properties"), schema.get("required")
        parts = []
        if isinstance(properties, Mapping) and properties:
            for key, each in properties.items():
                if takes_text(each, root):
                    rules.check_strict(tool, each, ("maxLength",))
                one = rules.rule(
                    f"{self.before_value(rules, written(key))} {self._value(rules, each, root, strict=tool.strict)} W?"
                )
                parts.append(one if isinstance(required, list) and key in required else f"{one}?")
        elif schema.get("additionalProperties") is not False:
            parts.append(f"({self.before_value(rules, '/[a-zA-Z0-9_.-]{1,64}/')} {self._text(rules)} W?)*")
        return " ".join(parts)

    def _value(self, rules: CallRules, schema: Any, root: Mapping[str, Any], *, strict: bool) -> str:
        """Returns a value and the end of its parameter."""
        found, end, line = resolved(schema, root), rules.mark(self.reader.VALUE_END), '"\\n"?' if self.reader.OWN_LINES else ""
        texts = constants_of(found)
        if not takes_text(schema, root):
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
            return f"W? {rules.schema({**shared, **schema}, strict=strict)} W? {end}"
        if texts and all(isinstance(text, str) for text in texts):
            return f"{line} ({' | '.join(map(written, texts))}) {line} {end}"
        most = found.get("maxLength")
        return self._text(rules, most if counted(most) else None)

    def _text(self, rules: CallRules, most: int | None = None) -> str:
        return rules.up_to(self.reader.VALUE_END, most, own_lines=self.reader.OWN_LINES)
