"""Answers in harmony made of messages, for the tests of their reader."""

from __future__ import annotations

import json
from typing import NamedTuple

from hypothesis import strategies as st

from rooftile.engine.chat.harmony.header import MARKS
from tests.engine.chat.tools.reading import TOOLS

# how models write the header of a message to a function, and of one to a channel
TO_FUNCTION = (
    "<|channel|>commentary to=functions.{name} <|constrain|>json", " to=functions.{name}<|channel|>commentary json",
    "<|channel|>commentary to=functions.{name}<|constrain|>json", "<|channel|>analysis to=functions.{name} code",
    " to=functions.{name}<|channel|>commentary <|constrain|>json", "<|channel|>commentary to=functions.{name}",
)  # fmt: skip
TO_USER = ("<|channel|>analysis", "<|channel|>commentary", "<|channel|>final", "<|channel|>final <|constrain|>json")
WORDS = st.text(alphabet=' a\nB{}"\\<|>é😀analysisto=.', max_size=24)


class Said(NamedTuple):
    """A message: its header, its text, and the mark that ends it."""

    header: str
    text: str
    end: str


@st.composite
def messages(draw: st.DrawFn) -> list[Said]:
    """Messages as a model writes them: thoughts, calls and texts for the user."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            found.append(Said(draw(st.sampled_from(TO_USER)), draw(WORDS), draw(st.sampled_from(("<|end|>", "<|return|>")))))
            continue
        header = draw(st.sampled_from(TO_FUNCTION)).format(name=draw(st.sampled_from([tool.name for tool in TOOLS])))
        arguments = draw(st.dictionaries(WORDS, st.one_of(WORDS, st.integers(-9, 99), st.none()), max_size=3))
        text = json.dumps(arguments, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from((None, 2))))
        found.append(Said(header, text, draw(st.sampled_from(("<|call|>", "<|end|>")))))
    return found


def written(said: list[Said]) -> str:
    """The text of an answer behind `<|start|>assistant`."""
    return "<|start|>assistant".join(f"{each.header}<|message|>{each.text}{each.end}" for each in said)


# pieces for answers in no order
PIECES = [
    *MARKS,
    *TO_FUNCTION[0].format(name="add").split("<|constrain|>"),
    *TO_USER,
    "assistant",
    '{"a": 1}',
    "Good day. ",
    "to=",
]
