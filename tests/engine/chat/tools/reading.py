"""Tools, whole readings, and texts made of a syntax's own pieces, for the tests of all readers of calls."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies

from rooftile.engine.chat.parts import Part, joined, read_whole
from rooftile.engine.chat.tools.reader import CallReader
from rooftile.engine.chat.tools.tool import Tool

WEATHER = {
    "type": "object", "required": ["city"],
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "object"}},
}  # fmt: skip
TOOLS = [Tool("weather", WEATHER, False, {}), Tool("add", {"type": "object"}, False, {})]


def parts_of(reader: CallReader, pieces: Sequence[str]) -> list[Part]:
    """Returns the joined parts of a text that comes in pieces."""
    found = [part for piece in pieces for part in reader.feed(piece)]
    return joined(found + reader.finish())


def said(kind: type[CallReader], text: str) -> tuple[str, list[tuple[str, str]], list[str | None]]:
    """Returns a text's content, its calls, and what is broken in each of them."""
    answer = read_whole(kind(TOOLS), text)
    return answer.content, [(call.name, call.arguments) for call in answer.calls], [call.broken for call in answer.calls]


def texts(pieces: Sequence[str]) -> strategies.SearchStrategy[str]:
    """Random texts of some pieces, whole and cut, and of other characters."""
    cut = strategies.sampled_from(pieces).flatmap(lambda piece: strategies.integers(0, len(piece)).map(lambda n: piece[:n]))
    kinds = [strategies.sampled_from(pieces), cut, strategies.text(alphabet=' {}[]",:\\na1<>|', max_size=6)]
    return strategies.lists(strategies.one_of(kinds), max_size=14).map("".join)
