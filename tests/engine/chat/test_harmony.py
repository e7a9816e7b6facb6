"""gpt-oss's answers: channels become thoughts, calls and content, the same for every cut, and as OpenAI's parser reads them."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from rooftile.engine.chat.harmony.header import ENDS, MARKS, Header, last_turn
from rooftile.engine.chat.harmony.reader import LONGEST_HEADER, HarmonyReader
from rooftile.engine.chat.parts import CallArguments, CallBroken, CallEnd, CallStart, Content, Part, Thought, joined
from rooftile.engine.chat.reading import choose_reading, marks_of
from rooftile.engine.chat.thought_formats import HARMONY
from rooftile.engine.text.chat_template import render
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput
from tests.engine.chat.harmony import PIECES, messages, written
from tests.engine.chat.tools.reading import TOOLS, parts_of, texts
from tests.engine.folders import core
from tests.server.harmony import TEMPLATE

FOLDER = os.environ.get("ROOFTILE_CHAT_TEMPLATES")

CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
CALLED = [CallStart(0, "add"), CallArguments(0, '{"a": 1}'), CallEnd(0)]
THINKS = "<|channel|>analysis<|message|>So.<|end|>"
AGAIN = "<|start|>assistant"


def read(text: str, turn: str = "assistant", **options: Any) -> list[Part]:
    return parts_of(HarmonyReader(TOOLS, turn, **options), [text])


@pytest.mark.parametrize(
    ("text", "due"),
    [
        (f"{THINKS}{AGAIN}<|channel|>final<|message|> Hi \n<|return|>", [Thought("So."), Content(" Hi \n")]),
        (f"{THINKS}{AGAIN}{CALL}<|call|>", [Thought("So."), *CALLED]),
        (f"{CALL}<|call|>", CALLED),
        (CALL, CALLED),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', CALLED),
        # a name alone is a function if it is one; a tool of the model's own is none
        (CALL.replace("functions.", ""), CALLED),
        (CALL.replace("functions.add", "python"), [Content('{"a": 1}')]),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [Thought("1 + 1")]),
        (CALL.replace(".add", ".unknown"), [CallStart(0, "unknown"), *CALLED[1:]]),
        (CALL.replace(".add", ".no name"), [CallStart(0, "no"), *CALLED[1:]]),
        (CALL.replace(".add", ".$"), [Content('{"a": 1}')]),
        (CALL.replace('{"a": 1}', "") + "<|call|>", [CALLED[0], CallArguments(0, "{}"), CALLED[2]]),
        # what is said before a call is for the user
        (f"<|channel|>commentary<|message|>I look.<|end|>{AGAIN}{CALL}<|call|>", [Content("I look."), *CALLED]),
        # two messages of a kind are two paragraphs
        (f"{THINKS}{AGAIN}{THINKS}{AGAIN}{THINKS}", [Thought("So.\n\nSo.\n\nSo.")]),
        (f"{CALL}<|end|>{AGAIN}{CALL}", [*CALLED, CallStart(1, "add"), CallArguments(1, '{"a": 1}'), CallEnd(1)]),
        # other text than messages is content; a mark never is
        ("  Good day.\n", [Content("  Good day.\n")]),
        ("<|channel|>final<|message|>a<|message|>b<|constrain|>c", [Content("abc")]),
        ("<|message|>a", [Content("a")]),
        ("<|channel|>final<|message|>a<|retur", [Content("a<|retur")]),
        # messages that lack their end, or the beginning of the next
        (f"<|channel|>analysis<|message|>So.{AGAIN}<|channel|>final<|message|>a", [Thought("So."), Content("a")]),
        ("<|channel|>analysis<|message|>So.<|channel|>final<|message|>a", [Thought("So."), Content("a")]),
        (f"{THINKS}<|channel|>final<|message|>a", [Thought("So."), Content("a")]),
        # broken off in a header
        ("<|channel|>anal", []),
        ("<|start|>assis", []),
        ("<|channel|>commentary to=functions.ad", []),
        ("<|channel|>commentary to=functions.add <|con", [CALLED[0], CallBroken(0, "the text ends before its arguments")]),
        ("", []),
    ],
)  # fmt: skip
def test_answers(text: str, due: list[Part]) -> None:
    assert read(text) == due
    assert read("".join(text), "assistant") == parts_of(HarmonyReader(TOOLS), [*text]) == due


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [('{"a": "Ki', '{"a": "Ki'), ("print(1)<|call|>", ""), ("[1]<|call|>", ""), ('{"a" 1}<|call|>', '{"a" 1}'), ("", "")],
)
def test_a_broken_call_is_told(arguments: str, passed: str) -> None:
    first, *middle, last = read(CALL.replace('{"a": 1}', arguments) + f"{AGAIN}<|channel|>final<|message|>b" * ("<" in arguments))
    assert first == CallStart(0, "add")
    if "<" in arguments:
        # the rest of the answer is read
        assert last == Content("b")
        last = middle.pop()
    assert isinstance(last, CallBroken)
    assert last.why
    assert "".join(part.text for part in middle if isinstance(part, CallArguments)) == passed


@pytest.mark.parametrize(
    ("turn", "text", "due"),
    [
        ("assistant<|channel|>final<|message|>So f", "ar.", [Content("ar.")]),
        ("assistant<|channel|>analysis<|message|>So f", "ar.<|end|>", [Thought("ar.")]),
        ("assistant<|channel|>analysis", "<|message|>So.<|end|>", [Thought("So.")]),
        ("assistant<|channel|>", "final<|message|>a", [Content("a")]),
        ("user<|message|>Hi<|end|>", f"{AGAIN}{THINKS}", [Thought("So.")]),
    ],
)
def test_an_answer_begins_where_the_prompt_ends(turn: str, text: str, due: list[Part]) -> None:
    assert read(text, turn) == due


def test_the_last_turn_of_a_prompt() -> None:
    made = core("byte_level")
    made.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    own, other = Tokenizer(made), Tokenizer(core("byte_level"))
    for text, due in [
        ("<|start|>user<|message|>a<|end|><|start|>assistant", "assistant"),
        ("<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>" + "ab " * 99, None),
        ("Good day.", "assistant"),
    ]:
        assert last_turn(own, own.encode(text, special=False)) == (due or text.rpartition("<|start|>")[2])
    assert last_turn(other, other.encode("<|start|>assistant", special=False)) == "assistant"


def test_without_tools_or_without_thoughts() -> None:
    text = f"{THINKS}{AGAIN}{CALL}<|call|>"
    assert parts_of(HarmonyReader(None), [text]) == [Thought("So."), Content('{"a": 1}')]
    assert read(text, thinks=False) == [Content("So."), *CALLED]


def test_parts_come_early() -> None:
    reader = HarmonyReader(TOOLS)
    assert reader.feed("<|channel|>analysis<|message|>So") == [Thought("So")]
    assert reader.thinking
    assert reader.feed(" it<|en") == [Thought(" it")]
    assert reader.feed(f"d|>{AGAIN} to=functions.weather<|channel|>commentary json<|message|>") == [CallStart(0, "weather")]
    assert not reader.thinking
    assert reader.feed('{"city": "K') == [CallArguments(0, '{"city": "K')]
    assert reader.feed('"}') == [CallArguments(0, '"}'), CallEnd(0)]
    assert reader.spans == [(30, 35)]


@settings(max_examples=150, deadline=None)
@given(text=texts(PIECES), turn=st.sampled_from(("assistant", "assistant<|channel|>final<|message|>", "user<|message|>a<|end|>")))
def test_every_cut_gives_the_parts_of_the_whole(text: str, turn: str) -> None:
    whole = HarmonyReader(TOOLS, turn)
    due = parts_of(whole, [text])
    for pieces in ([*text], *([text[:cut], text[cut:]] for cut in range(0, len(text), 3))):
        made = HarmonyReader(TOOLS, turn)
        assert parts_of(made, pieces) == due, pieces
        assert made.spans == whole.spans
    said = "".join(part.text for part in due if isinstance(part, Content | Thought))
    assert not any(mark in said for mark in MARKS)
    assert all(0 <= begin <= end <= len(text) for begin, end in whole.spans)
    thought = "".join(part.text for part in due if isinstance(part, Thought))
    assert (
        "\n\n".join(text[begin:end] for begin, end in whole.spans if begin < end)
        .replace("<|message|>", "")
        .replace("<|constrain|>", "")
        == thought
    )


@settings(max_examples=60, deadline=None)
@given(text=texts(PIECES))
def test_nothing_that_may_become_a_mark_is_told(text: str) -> None:
    """The parts that are told early are told at the end, too."""
    made, told = HarmonyReader(TOOLS), []
    for letter in text:
        told += made.feed(letter)
    early = joined(told)
    due = read(text)
    assert early[:-1] == due[: max(len(early) - 1, 0)]
    if early:
        last, own = due[len(early) - 1], early[-1]
        assert last == own or (type(last) is type(own) and last.text.startswith(own.text))  # type: ignore[union-attr]


def test_hostile_texts_end() -> None:
    long = "<|channel|>" + "final " * LONGEST_HEADER
    assert parts_of(HarmonyReader(TOOLS), [long]) == parts_of(HarmonyReader(TOOLS), [*long]) == [Content(long[11:])]
    assert read("<|channel|>" * 20_000) == []
    assert read("<|message|>" * 20_000) == []
    assert read(f"{THINKS}{AGAIN}" * 3000) == [Thought("\n\n".join(["So."] * 3000))]


def test_headers() -> None:
    assert Header.of("<|start|>assistant<|channel|>analysis") == Header("analysis", "", True)
    assert Header.of("<|start|>assistant to=a<|channel|>commentary json") == Header("commentary", "a", True)
    assert Header.of("<|channel|> to=functions.a") == Header("", "functions.a", False)
    assert Header.of("") == Header()
    assert Header("commentary", "functions.a-b_1").function(()) == "a-b_1"
    assert Header("commentary", "browser.open").function(()) is None


def test_the_format_has_thoughts_and_calls() -> None:
    template = "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}"
    own = Tokenizer(core("byte_level"), template=template)
    form, syntax = choose_reading(own)
    assert form is HARMONY
    assert syntax is not None
    assert (syntax.name, syntax.reader) == ("harmony", HarmonyReader)
    assert set(marks_of(form, syntax, None)) == set(MARKS) > set(ENDS)
    assert choose_reading(own, "none")[0] is None
    assert choose_reading(own, "openai_gptoss", "none") == (HARMONY, None)
    assert choose_reading(None) == (None, None)
    for names in (("harmony", "hermes"), ("qwen3", "harmony"), ("qwen3", "auto")):
        with pytest.raises(InvalidInput, match="do not go together; harmony has both"):
            choose_reading(own, *names)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """OpenAI's own parser; its vocabulary is a file of the package litellm, or of the folder that its variable names."""
    package = pytest.importorskip("openai_harmony")
    litellm = find_spec("litellm")
    with pytest.MonkeyPatch.context() as patch:
        if "TIKTOKEN_RS_CACHE_DIR" not in os.environ:
            if litellm is None or litellm.origin is None:
                pytest.skip("openai-harmony needs its vocabulary, which the package litellm has")
            patch.setenv("TIKTOKEN_RS_CACHE_DIR", str(Path(litellm.origin).parent / "litellm_core_utils/tokenizers"))
        yield package, package.load_harmony_encoding("HarmonyGptOss")


def parts_by(theirs: Any, ids: list[int]) -> list[Part]:
    """The parts of an answer as OpenAI's parser reads it, which may be cut off."""
    package, encoding = theirs
    parser = package.StreamableParser(encoding, package.Role.ASSISTANT)
    for id in ids:
        parser.process(id)
    read = [(each.channel, each.recipient, each.content[0].text, True) for each in parser.messages]
    if parser.state is package.StreamState.CONTENT:
        read.append((parser.current_channel, parser.current_recipient, parser.current_content, False))
    found: list[Part] = []
    for channel, recipient, text, ended in read:
        if (recipient or "").startswith("functions."):
            found += _call_of(found, recipient.removeprefix("functions."), text, ended)
            continue
        kind = Thought if channel == "analysis" else Content
        if text:
            found.append(kind("\n\n" * any(isinstance(part, kind) for part in found) + text))
    return joined(found)


def _call_of(found: list[Part], name: str, text: str, ended: bool) -> list[Part]:
    index = sum(isinstance(part, CallStart) for part in found)
    try:
        json.loads(text)
    except ValueError:
        assert not ended
        arguments = text.rstrip("\ufffd")
        return [CallStart(index, name), *([CallArguments(index, arguments)] if arguments else []), CallBroken(index, "")]
    return [CallStart(index, name), CallArguments(index, text), CallEnd(index)]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=messages(), data=st.data())
def test_parts_are_those_of_openais_parser(theirs: Any, said: list[Any], data: st.DataObject) -> None:
    """Whole answers are read alike, and answers that end at any token."""
    encoding = theirs[1]
    ids = encoding.encode(written(said), allowed_special="all")
    ids = ids[: data.draw(st.integers(1, len(ids)))]
    text = encoding.decode(ids)
    if text.endswith("\ufffd"):
        # half a character: their parser waits for the rest of it
        return
    own = [CallBroken(part.index, "") if isinstance(part, CallBroken) else part for part in read(text)]
    cut_in_header = any(isinstance(part, CallBroken) for part in own) and not text.rpartition("<|message|>")[0]
    due = parts_by(theirs, ids)
    head = text[max(text.rfind(AGAIN), 0) :]
    if cut_in_header or "<|message|>" not in head:
        # a call that is broken off in its header is told here alone
        own = own[: len(due)]
    assert own == due


CALLS = [
    {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    for id, name, arguments in (("a", "weather", '{"city": "Kiel"}'), ("b", "add", {"a": 1}))
]
CONVERSATION = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "How warm?"},
    {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "b", "content": "3"}, {"role": "tool", "tool_call_id": "a", "content": "7"},
    {"role": "developer", "content": "Be kind."}, {"role": "user", "content": "And now?"},
]  # fmt: skip
OURS = {"small": TEMPLATE} | (
    {"published": (Path(FOLDER) / "openai-gpt-oss-120b.jinja").read_text(encoding="utf-8")} if FOLDER else {}
)


@pytest.mark.parametrize("name", OURS)
def test_openais_parser_reads_the_conversation(theirs: Any, name: str) -> None:
    """Each call has its own message and its own result behind it, and the operator's messages are where they were."""
    _, encoding = theirs
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
    text = render(OURS[name], CONVERSATION, True, {}, "here", tools=tools)
    whole, mark, opening = text.rpartition("<|start|>")
    assert mark + opening == "<|start|>assistant"
    ids = encoding.encode(whole, allowed_special="all")
    found = encoding.parse_messages_from_completion_tokens(ids, None)
    assert [each.author.role.value for each in found[:2]] == ["system", "developer"]
    assert "Be brief." in found[1].content[0].text
    *turn, late, last = [
        (each.author.name or each.author.role.value, each.channel, each.recipient, each.content[0].text) for each in found[2:]
    ]
    assert turn == [
        ("user", None, None, "How warm?"), ("assistant", "analysis", None, "Hm."),
        ("assistant", "commentary", "functions.weather", '{"city": "Kiel"}'),
        ("functions.weather", "commentary", "assistant", '"7"'), ("assistant", "commentary", "functions.add", '{"a": 1}'),
        ("functions.add", "commentary", "assistant", '"3"'),
    ]  # fmt: skip
    assert (late[0], late[3].strip()) == ("developer", "# Instructions\n\nBe kind.")
    assert last == ("user", None, None, "And now?")
