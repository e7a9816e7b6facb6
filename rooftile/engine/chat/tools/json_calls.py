"""Calls that are JSON objects with a name and arguments: alone, in a list, or one after another."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import NamedTuple

from rooftile.engine.chat.tools.cursor import Reading, Unreadable, held_of
from rooftile.engine.chat.tools.reader import CallReader, object_of

# arguments that are written as a string, in characters
LONGEST_VALUE = 2**20


class CallKeys(NamedTuple):
    """The keys of an object that is a call.

    Args:
        name, arguments: the function's name, and words for its arguments.
        beside: keys that models write beside these, and that change nothing.
    """

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    beside: tuple[str, ...] = ("id", "type", "index")


USUAL = CallKeys()


def read_json_call(reader: CallReader, known: Collection[str] | None = None, keys: CallKeys = USUAL) -> Reading[None]:
    """Reads one object; its arguments are passed on as they come if the name stands before them.

    Args:
        reader: the reader that meets it.
        known: the names of functions, where a name that is none of them means that this is no call.
        keys: the keys that the model writes.

    Raises:
        Unreadable: it is no such object.
    """
    cursor = reader.cursor
    started = had_arguments = False
    early: str | None = None
    yield from cursor.expect("{")
    while True:
        yield from cursor.skip_spaces()
        key = yield from cursor.string()
        yield from cursor.skip_spaces()
        yield from cursor.expect(":")
        yield from cursor.skip_spaces()
        if key == keys.name and not started:
            name = yield from cursor.string()
            yield reader.start(name, known)
            started = True
            if early is not None:
                yield reader.arguments(early)
        elif key in keys.arguments and not had_arguments:
            had_arguments = True
            if started:
                yield from read_arguments(reader)
            else:
                early = yield from _whole_value(reader)
                early = _as_object(early)
        elif key in keys.beside:
            yield from _whole_value(reader)
        else:
            raise Unreadable(f"{key[:40]!r} is no key of a call")
        yield from cursor.skip_spaces()
        if not (yield from cursor.next()) and started and had_arguments:
            # only its mark of the end is missing
            break
        if (yield from cursor.expect(",", "}")) == "}":
            break
    if not started:
        raise Unreadable("the call has no name")
    if not had_arguments:
        yield reader.arguments("{}")
    yield reader.end()


def read_json_calls(reader: CallReader, *, in_list: bool = False, keys: CallKeys = USUAL) -> Reading[None]:
    """Reads a list of call objects, or a single call object.

    Args:
        reader: the reader that meets it.
        in_list: whether the bracket that opens a list is read already.
        keys: the keys that the model writes.
    """
    cursor = reader.cursor
    yield from cursor.skip_spaces()
    if not in_list and not (yield from cursor.skip("[")):
        yield from read_json_call(reader, keys=keys)
        return
    while True:
        yield from cursor.skip_spaces()
        yield from read_json_call(reader, keys=keys)
        if not (yield from cursor.skip_behind_spaces(",")):
            break
    yield from cursor.skip_behind_spaces("]")


def read_arguments(reader: CallReader) -> Reading[None]:
    """Reads the value that is the arguments of a call that has begun: an object, its text as a string, or null."""
    first = yield from reader.cursor.next()
    if first != "{":
        yield reader.arguments(_as_object((yield from _whole_value(reader))))
        return
    whole = ""
    scan = _Scan()
    while True:
        count, closed = scan.find_end(reader.cursor.text)
        piece = reader.cursor.take(count)
        whole += piece
        if piece:
            yield reader.arguments(piece)
        if closed:
            break
        if reader.cursor.ended:
            raise Unreadable("the text ends within its arguments")
        yield None
    object_of(whole)


def pass_on_text(reader: CallReader, *ends: str) -> Reading[None]:
    """Reads a text up to one of some marks, of which the last is due, and passes it on as a JSON string, as it comes."""
    cursor = reader.cursor
    yield reader.arguments('"')
    while True:
        found = [(place, mark) for mark in ends if (place := cursor.text.find(mark)) >= 0]
        place, mark = min(found) if found else (len(cursor.text) - held_of(cursor.text, ends), "")
        if place:
            yield reader.arguments(json.dumps(cursor.take(place), ensure_ascii=False)[1:-1])
        if found:
            cursor.take(len(mark))
            break
        if cursor.ended:
            raise Unreadable(f"the text ends before {ends[-1]!r}")
        yield None
    yield reader.arguments('"')


def _whole_value(reader: CallReader) -> Reading[str]:
    """Returns a JSON value as text, and goes behind it."""
    cursor = reader.cursor
    first = yield from cursor.next()
    if first == '"':
        return (yield from cursor.written_string(LONGEST_VALUE))
    if first and first in "{[":
        scan, whole = _Scan(), ""
        while True:
            count, closed = scan.find_end(cursor.text)
            whole += cursor.take(count)
            if closed:
                return whole
            if cursor.ended:
                raise Unreadable("the text ends within a value")
            yield None
    whole = ""
    while (following := (yield from cursor.next())) and (following.isalnum() or following in "+-."):
        whole += cursor.take(1)
    return whole


def _as_object(value: str) -> str:
    """Returns arguments that are written as a whole value."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        try:
            value = json.loads(value, strict=False)
        except ValueError:
            raise Unreadable(f"its arguments are no JSON: {value[:40]!r}") from None
    return object_of(value)


class _Scan:
    """Finds the end of an object or a list in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find_end(self, text: str) -> tuple[int, bool]:
        """Returns how many characters of a piece belong to the value, and whether it ends there."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1, True
        return len(text), False
