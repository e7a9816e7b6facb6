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

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rooftile.engine.chat.tools.cursor import Reading, Unreadable, held_of
from rooftile.engine.chat.tools.grammar import CallForm, CallRules, written
from rooftile.engine.chat.tools.json_calls import LONGEST_VALUE
from rooftile.engine.chat.tools.reader import CallReader
from rooftile.engine.chat.tools.schema_types import constants_of, counted, resolved, takes_text, types_of, value_of
from rooftile.engine.chat.tools.tool import Tool

FUNCTION, PARAMETER = "<function=", "<parameter="
END_OF_FUNCTION, END_OF_PARAMETER = "</function>", "</parameter>"


class QwenXmlReader(CallReader):
    """Reads calls in tags; models leave the outer pair out at times. Strings are passed on as they come."""

    MARKS = ("<tool_call>", FUNCTION)
    INSIDE = (PARAMETER, END_OF_PARAMETER, END_OF_FUNCTION)
    ENDS = ("</tool_call>",)

    def calls(self, mark: str) -> Reading[None]:
        """Reads functions, one after another, and the end of the outer pair."""
        if mark != FUNCTION:
            yield from self.cursor.skip_spaces()
            yield from self.cursor.expect(FUNCTION)
        while True:
            yield from self._call()
            if not (yield from self.cursor.skip_behind_spaces(FUNCTION)):
                break
        yield from self.cursor.skip_behind_spaces("</tool_call>")

    def _call(self) -> Reading[None]:
        cursor = self.cursor
        name, _ = yield from cursor.until(">", most=80)
        yield self.start(name.strip())
        tool = self.tools.get(name.strip())
        root: Mapping[str, Any] = {} if tool is None else tool.parameters
        properties = resolved(root, root).get("properties")
        seen = set[str]()
        while True:
            yield from cursor.skip_spaces()
            if (yield from cursor.expect(PARAMETER, END_OF_FUNCTION)) == END_OF_FUNCTION:
                break
            key, _ = yield from cursor.until(">")
            if key in seen:
                raise Unreadable(f"the parameter {key[:40]!r} stands twice")
            yield self.arguments(f"{', ' if seen else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            seen.add(key)
            # a parameter that the function does not have is a string
            schema = properties.get(key, {"type": "string"}) if isinstance(properties, Mapping) else {"type": "string"}
            yield from cursor.skip("\n")
            if types_of(schema, root) == {"string"}:
                yield from self._string()
            else:
                text, _ = yield from cursor.until(END_OF_PARAMETER, most=LONGEST_VALUE)
                yield self.arguments(value_of(text.removesuffix("\n"), schema, root))
        yield self.arguments("}" if seen else "{}")
        yield self.end()

    def _string(self) -> Reading[None]:
        """Reads a string up to the end of its parameter, and passes it on."""
        cursor, ends = self.cursor, ("\n" + END_OF_PARAMETER, END_OF_PARAMETER)
        yield self.arguments('"')
        while True:
            found = [(place, mark) for mark in ends if (place := cursor.text.find(mark)) >= 0]
            place, mark = min(found) if found else (len(cursor.text) - held_of(cursor.text, ends), "")
            if place:
                yield self.arguments(json.dumps(cursor.take(place), ensure_ascii=False)[1:-1])
            if found:
                cursor.take(len(mark))
                break
            if cursor.ended:
                raise Unreadable(f"the text ends before {END_OF_PARAMETER!r}")
            yield None
        yield self.arguments('"')


class QwenXmlForm(CallForm):
    """Writes a function's required parameters, and those others that the model wants, in the order of the schema."""

    marks = QwenXmlReader.MARKS

    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns a call in its tags, with the outer pair or without."""
        calls = " | ".join(rules.rule(self._function(rules, tool)) for tool in tools)
        call = rules.rule(f"{written(FUNCTION)} ({calls}) {written(END_OF_FUNCTION)}")
        return f"{rules.mark('<tool_call>')} W? {call} W? {rules.mark('</tool_call>')} | {call}"

    def _function(self, rules: CallRules, tool: Tool) -> str:
        root = rules.parameters(tool)
        schema = resolved(root, root)
        properties, required = schema.get("properties"), schema.get("required")
        parameters = [f"{written(tool.name + '>')} W?"]
        if isinstance(properties, Mapping) and properties:
            for key, each in properties.items():
                if takes_text(each, root):
                    rules.check_strict(tool, each, ("maxLength",))
                one = rules.rule(f"{written(PARAMETER + key + '>')} {self._value(rules, each, root, strict=tool.strict)} W?")
                parameters.append(one if isinstance(required, list) and key in required else f"{one}?")
        elif schema.get("additionalProperties") is not False:
            name = r"/[a-zA-Z0-9_.-]{1,64}/"
            parameters.append(f'({written(PARAMETER)} {name} ">" {rules.up_to(END_OF_PARAMETER)} W?)*')
        return " ".join(parameters)

    def _value(self, rules: CallRules, schema: Any, root: Mapping[str, Any], *, strict: bool) -> str:
        """Returns a value and the end of its parameter."""
        found = resolved(schema, root)
        end = f'"\\n"? {written(END_OF_PARAMETER)}'
        texts = constants_of(found)
        if not takes_text(schema, root):
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
            return f"W? {rules.schema({**shared, **schema}, strict=strict)} W? {written(END_OF_PARAMETER)}"
        if texts and all(isinstance(text, str) for text in texts):
            return f'"\\n"? ({" | ".join(map(written, texts))}) {end}'
        most = found.get("maxLength")
        return rules.up_to(END_OF_PARAMETER, most if counted(most) else None)
