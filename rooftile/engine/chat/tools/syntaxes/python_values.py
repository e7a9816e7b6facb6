"""Values of Python as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from rooftile.engine.chat.tools.cursor import SPACES, Cursor, Reading, Unreadable
from rooftile.engine.chat.tools.json_calls import LONGEST_VALUE

DEEPEST = 64
QUOTES = "'\""
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
