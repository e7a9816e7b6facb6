"""Values of Python as JSON, and their grammar from a JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rooftile.engine.chat.tools.cursor import SPACES, Cursor, Reading, Unreadable
from rooftile.engine.chat.tools.grammar import CallRules, written
from rooftile.engine.chat.tools.json_calls import LONGEST_VALUE
from rooftile.engine.chat.tools.schema_types import constants_of, counted, resolved, types_of

DEEPEST = 64
QUOTES = "'\""
# bounds that the grammar follows
BOUNDS = ("maxLength", "minLength", "maxItems", "minItems")
# models write JSON's names, too
_NAMES = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_WORD = re.compile(r"[A-Za-z_]+|[+-]?[0-9][0-9.eE+-]*")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}


def read_python_value(cursor: Cursor) -> Reading[str]:
    """Returns a literal of Python as JSON, and goes behind it: up to a comma or a bracket that it does not open.

    Raises:
        Unreadable: it is no literal, or has no end.
    """
    depth, place, quote = 0, 0, ""
    while True:
        while place < len(cursor.text):
            character = cursor.text[place]
            if quote:
                # an escaped quote does not end the string
                place += character == "\\"
                quote = "" if character == quote else quote
            elif character in QUOTES:
                quote = character
            elif character in "[{(":
                depth += 1
            elif depth == 0 and character in ",)]}":
                return as_json(cursor.take(place))
            elif character in ")]}":
                depth -= 1
            if place > LONGEST_VALUE or depth > DEEPEST:
                raise Unreadable(f"a value has more than {LONGEST_VALUE:,} characters or {DEEPEST} levels")
            place += 1
        if cursor.ended:
            raise Unreadable("the text ends within a value")
        yield None


def as_json(text: str) -> str:
    """Returns a literal of Python as JSON.

    Raises:
        Unreadable: it is none.

    Example:
        >>> as_json("{'a': [True, None, 0.5]}")
        '{"a": [true, null, 0.5]}'
    """
    try:
        literal = _Literal(text)
        found = json.dumps(literal.whole(), ensure_ascii=False, allow_nan=False)
        # half of a surrogate pair is no text
        found.encode()
    except (ValueError, IndexError, RecursionError):
        raise Unreadable(f"{text[:40]!r} is no value of Python") from None
    return found


class _Literal:
    """Reads a literal; ValueError or IndexError says that it is none."""

    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0

    def whole(self) -> Any:
        found = self._value()
        self._skip_spaces()
        if self._place < len(self._text):
            raise ValueError("more text follows")
        return found

    def _skip_spaces(self) -> None:
        while self._place < len(self._text) and self._text[self._place] in SPACES:
            self._place += 1

    def _takes(self, character: str) -> bool:
        self._skip_spaces()
        found = self._text[self._place] == character
        self._place += found
        return found

    def _value(self) -> Any:
        self._skip_spaces()
        first = self._text[self._place]
        if first in QUOTES:
            return self._string()
        if first in "[({":
            return self._dictionary() if first == "{" else self._list("]" if first == "[" else ")")
        word = _WORD.match(self._text, self._place)
        if word is None:
            raise ValueError("it is no value")
        self._place = word.end()
        if word[0] in _NAMES:
            return _NAMES[word[0]]
        return int(word[0]) if word[0].lstrip("+-").isdigit() else float(word[0])

    def _list(self, end: str) -> list[Any]:
        found: list[Any] = []
        self._place += 1
        while not self._takes(end):
            if found:
                self._comma()
                if self._takes(end):
                    break
            found.append(self._value())
        return found

    def _dictionary(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._place += 1
        while not self._takes("}"):
            if found:
                self._comma()
                if self._takes("}"):
                    break
            key = self._value()
            if not isinstance(key, str) or not self._takes(":"):
                raise ValueError("it is no key")
            found[key] = self._value()
        return found

    def _comma(self) -> None:
        if not self._takes(","):
            raise ValueError("a comma is due")

    def _string(self) -> str:
        quote, found = self._text[self._place], list[str]()
        self._place += 1
        while (character := self._text[self._place]) != quote:
            self._place += 1
            found.append(self._escaped() if character == "\\" else character)
        self._place += 1
        return "".join(found)

    def _escaped(self) -> str:
        letter = self._text[self._place]
        self._place += 1
        if letter in _HEX:
            digits = self._text[self._place : self._place + _HEX[letter]]
            self._place += _HEX[letter]
            if len(digits) < _HEX[letter]:
                raise ValueError("digits are missing")
            return chr(int(digits, 16))
        return letter if letter in "\\'\"" else _ESCAPES.get(letter, "\\" + letter)


def _strings(times: str) -> str:
    """Returns the regular expressions of strings with a number of characters, in Lark's form."""
    # no halves of surrogate pairs
    code = r"u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"
    escape = rf"\\([\x22'\\nrtbf]|x[0-9a-fA-F]{{2}}|{code})"
    return " | ".join(rf"/{quote}([^{quote}\\\x00-\x1f]|{escape}){times}{quote}/" for quote in (r"\x22", "'"))


_TERMINALS = {
    "PY_STRING": _strings("*"),
    "PY_INTEGER": r"/-?(0|[1-9][0-9]{0,17})/",
    "PY_NUMBER": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/",
}


class PythonRules:
    """Rules of literals, which are added to a grammar as they are needed.

    Args:
        rules: the grammar.
        root: the schema in which others are, for references.
    """

    def __init__(self, rules: CallRules, root: Mapping[str, Any]) -> None:
        self._rules, self._root = rules, root
        # the rules of schemas, which may have themselves in them
        self._made: dict[int, str] = {}

    def value(self, schema: Any) -> str:
        """Adds the rule of a schema's values; returns its name."""
        found = resolved(schema, self._root)
        if not types_of(found, self._root):
            return self._any()
        name = self._made.get(id(found))
        if name is None:
            name = self._made[id(found)] = self._rules.fresh_name()
            self._rules.rule(self._body(found), name=name)
        return name

    def _body(self, schema: Mapping[str, Any]) -> str:
        several = schema.get("anyOf") or schema.get("oneOf")
        constants = constants_of(schema)
        if constants:
            return " | ".join(self._constant(each) for each in constants)
        if isinstance(several, list) and "type" not in schema:
            return " | ".join(self.value(each) for each in several)
        return " | ".join(self._of_type(kind, schema) for kind in sorted(types_of(schema, self._root)))

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            least, most = (value if counted(value := schema.get(key)) else None for key in ("minLength", "maxLength"))
            if least is None and most is None:
                return self._terminal("PY_STRING")
            return _strings(f"{{{least or 0},{'' if most is None else most}}}")
        if kind in ("integer", "number"):
            return self._terminal(f"PY_{kind.upper()}")
        if kind == "boolean":
            return '"True" | "False"'
        if kind == "null":
            return '"None"'
        if kind == "array":
            item = self.value(schema.get("items", {}))
            least, most = (value if counted(value := schema.get(key)) else None for key in ("minItems", "maxItems"))
            more = f"{{{max(0, (least or 0) - 1)},{'' if most is None else max(0, most - 1)}}}"
            items = f'({item} (W? "," W? {item}){more}){"" if least else "?"} W?'
            return f'"[" W? {"" if most == 0 else items} "]"'
        properties, required = schema.get("properties"), schema.get("required")
        if kind != "object" or not isinstance(properties, Mapping) or not properties:
            entry = self._entry(None, {})
            return f'"{{" W? ({entry} (W? "," W? {entry})*)? W? "}}"'
        entries = [(self._entry(key, each), isinstance(required, list) and key in required) for key, each in properties.items()]
        return f'"{{" W? {self._rules.sequence(entries)} W? "}}"'

    def _entry(self, key: str | None, schema: Any) -> str:
        named = self._terminal("PY_STRING") if key is None else f"({self._constant(key)})"
        return self._rules.rule(f'{named} W? ":" W? {self.value(schema)}')

    def _any(self) -> str:
        """Returns the rule of any literal, which is added once."""
        if self._rules.has("py_any"):
            return "py_any"
        string, number = self._terminal("PY_STRING"), self._terminal("PY_NUMBER")
        comma = 'W? "," W?'
        entry = f'{string} W? ":" W? py_any'
        plain = f'{string} | {number} | "True" | "False" | "None"'
        lists = f'"[" W? (py_any ({comma} py_any)*)? W? "]" | "{{" W? ({entry} ({comma} {entry})*)? W? "}}"'
        return self._rules.rule(f"{plain} | {lists}", name="py_any")

    def _terminal(self, name: str) -> str:
        return name if self._rules.has(name) else self._rules.rule(_TERMINALS[name], name=name)

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            # in either kind of quotes
            return f"{written(json.dumps(value, ensure_ascii=False))} | {written(repr(value))}"
        return written(repr(value))
