"""Writes a grammar in GBNF, the EBNF of llama.cpp and XGrammar, in Lark's form, which llguidance reads.

root ::= "yes" | digit{2,3} "." rest*        start: "yes" | r1{2,3} "." r2*
digit ::= [0-9]                              r1: /[\\x{30}-\\x{39}]/
rest ::= [^"\\\\] | "\\n"                       r2: /[^\\x{22}\\x{5c}]/ | "\\n"
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from rooftile.errors import InvalidInput

# brackets in brackets; llguidance has a bound of its own
DEPTH = 64
_TOKENS = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+) | (?P<define>::=) | (?P<name>[A-Za-z_][A-Za-z0-9_-]*) | (?P<text>"(?:\\.|[^"\\\n])*")
    | (?P<set>\[(?:\\.|[^\]\\])*\]) | (?P<times>[*+?]|\{\s*\d*\s*(?:,\s*\d*\s*)?\}) | (?P<mark>[|().])""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_HEX = {"x": 2, "u": 4, "U": 8}


class _Token(NamedTuple):
    kind: str
    text: str


def is_gbnf(grammar: str) -> bool:
    """Tells whether a grammar is written in GBNF; Lark's rules have a plain colon.

    Example:
        >>> is_gbnf('root ::= "a"'), is_gbnf('start: "a"')
        (True, False)
    """
    return re.search(r"^\s*[A-Za-z_][\w-]*\s*::=", grammar, re.MULTILINE | re.ASCII) is not None


def lark_of(grammar: str) -> str:
    """Returns a grammar of GBNF in Lark's form.

    Raises:
        InvalidInput: it is wrong, or has a form that is not taken.

    Example:
        >>> lark_of('root ::= "a" b? # a comment')
        Traceback (most recent call last):
        ...
        rooftile.errors.InvalidInput: the grammar cannot be used: the rule b is missing
    """
    tokens = list(_tokens_of(grammar))
    starts = [n for n, token in enumerate(tokens) if token.kind == "name" and tokens[n + 1 : n + 2] == [_Token("define", "::=")]]
    if not starts or starts[0]:
        raise _wrong("a rule begins with its name and ::=")
    names: dict[str, str] = {}
    for place in starts:
        name = tokens[place].text
        if name in names:
            raise _wrong(f"the rule {name[:40]} stands twice")
        names[name] = "start" if name == "root" else f"r{len(names)}"
    if "root" not in names:
        raise _wrong("the rule root is missing, with which a text begins")
    lines = []
    for first, last in zip(starts, [*starts[1:], len(tokens)], strict=True):
        lines.append(f"{names[tokens[first].text]}: {' '.join(_body(tokens[first + 2 : last], names))}")
    return "\n".join(lines)


def _tokens_of(grammar: str) -> Iterator[_Token]:
    place = 0
    while place < len(grammar):
        found = _TOKENS.match(grammar, place)
        if found is None:
            raise _wrong(f"{grammar[place : place + 12]!r} is no part of GBNF; a grammar in Lark's form has rules with a colon")
        if found.lastgroup != "space":
            yield _Token(str(found.lastgroup), found[0])
        place = found.end()


def _body(tokens: list[_Token], names: dict[str, str]) -> Iterator[str]:
    """Yields the parts of a rule in Lark's form."""
    depth, is_empty, may_repeat = 0, True, False
    for kind, text in tokens:
        if kind == "define":
            raise _wrong("::= stands in a rule")
        if kind == "times" and not may_repeat:
            raise _wrong(f"{text} follows nothing that it could repeat")
        if (text == "|" or text == ")") and kind == "mark" and is_empty:
            yield '""'
        depth += (kind == "mark") * ((text == "(") - (text == ")"))
        if not 0 <= depth <= DEPTH:
            raise _wrong("a bracket is closed that was not opened" if depth < 0 else f"brackets are nested deeper than {DEPTH}")
        is_empty = kind == "mark" and text in "(|"
        may_repeat = kind != "times" and not is_empty
        if kind == "name":
            if text not in names:
                raise _wrong(f"the rule {text[:40]} is missing")
            yield names[text]
        elif kind == "text":
            yield json.dumps("".join(_characters(text[1:-1])), ensure_ascii=False)
        elif kind == "set":
            yield _set_of(text[1:-1])
        elif kind == "times":
            yield _times_of(text)
        else:
            yield r"/(.|\n)/" if text == "." else text
    if depth:
        raise _wrong("a bracket is not closed")
    if is_empty:
        yield '""'


def _times_of(text: str) -> str:
    if text[0] != "{":
        return text
    least, comma, most = text[1:-1].replace(" ", "").partition(",")
    if not (least or most) or len(least) > 6 or len(most) > 6:
        raise _wrong(f"{text[:40]} is no number of times")
    return f"{{{least or 0}{comma}{most}}}"


def _set_of(text: str) -> str:
    """Returns the set between square brackets as a regular expression, whose characters are all numbers."""
    negated = text.startswith("^")
    characters = list(_escaped(text[negated:]))
    if not characters:
        raise _wrong("[] has no character")
    found, place = "", 0
    while place < len(characters):
        character, _ = characters[place]
        # a hyphen that is written with a backslash is a character
        if place + 2 < len(characters) and characters[place + 1] == ("-", False):
            last = characters[place + 2][0]
            if last < character:
                raise _wrong(f"the range {character}-{last} is empty")
            found += f"\\x{{{ord(character):x}}}-\\x{{{ord(last):x}}}"
            place += 3
        else:
            found += f"\\x{{{ord(character):x}}}"
            place += 1
    return f"/[{'^' * negated}{found}]/"


def _characters(text: str) -> Iterator[str]:
    return (character for character, _ in _escaped(text))


def _escaped(text: str) -> Iterator[tuple[str, bool]]:
    r"""Yields the characters of a text, and whether each is written with a backslash: \n, \x41, \u00e9 or \U0001f600."""
    place = 0
    while place < len(text):
        if text[place] != "\\":
            yield text[place], False
            place += 1
            continue
        letter = text[place + 1]
        digits = text[place + 2 : place + 2 + _HEX.get(letter, 0)]
        if letter in _HEX:
            if not re.fullmatch(rf"[0-9A-Fa-f]{{{_HEX[letter]}}}", digits) or not _is_character(int(digits, 16)):
                raise _wrong(f"\\{letter}{digits} is no character")
            yield chr(int(digits, 16)), True
        elif letter in _ESCAPES or not letter.isalnum():
            yield _ESCAPES.get(letter, letter), True
        else:
            raise _wrong(f"\\{letter} is no escape; has \\n, \\r, \\t, \\x, \\u and \\U")
        place += 2 + len(digits)


def _is_character(code: int) -> bool:
    return code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF


def _wrong(why: str) -> InvalidInput:
    return InvalidInput(f"the grammar cannot be used: {why}")
