"""Readers of calls: for every cut of a text the parts are those of the whole, and nothing of it is lost or leaks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies

from rooftile.engine.chat.parts import CallArguments, CallBroken, CallEnd, CallStart, Content
from rooftile.engine.chat.tools.choose import NAMES
from rooftile.engine.chat.tools.schema_types import value_of
from tests.engine.chat.tools.reading import TOOLS, parts_of, said, texts

HERMES, LLAMA, MISTRAL, QWEN, GRANITE, PHI, DEEPSEEK, PYTHONIC, GLM, KIMI, MINIMAX, M1, COHERE, GEMMA = (
    NAMES[name].reader
    for name in (
        "hermes", "llama3_json", "mistral", "qwen3_coder", "granite", "phi4_mini_json", "deepseek_v3", "pythonic", "glm45",
        "kimi_k2", "minimax_m2", "minimax", "cohere_command3", "gemma4",
    )
)  # fmt: skip
ARGUMENTS = '{"city": "Kiel }\\" \\\\", "days": 2}'
OBJECT = '{"name": "weather", "arguments": ' + ARGUMENTS + "}"
PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", "\n", OBJECT, '{"name": "add"}', '{"arguments": {}, "name": "add"}', "Good day. "],
    "llama3_json": [
        "<|python_tag|>", "; ", OBJECT.replace("arguments", "parameters"), '{"type": "function", "name": "add"', "}", "Hi",
        '{"a": 1}',
    ],
    "qwen3_coder": [
        "<tool_call>", "</tool_call>", "\n", "<function=weather>", "<function=add>\n", "</function>", "<parameter=city>\n",
        "Kiel", "</parameter>\n", "\n</parameter>", "<parameter=days>", "2", "<parameter=units>", '{"a": [1]}', "<parameter=x>",
        "Good day. ",
    ],
    "granite": ["<|tool_call|>", "<tool_call>", "[", "]", OBJECT, ", ", "Good day. "],
    "phi4_mini_json": ["functools[", "functools", "<|tool_call|>", "<|/tool_call|>", "[", "]", OBJECT, ", ", "Good day. "],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>", "function", "weather", "\n", "```json", "```", ARGUMENTS, "Good day. ",
    ],
    "glm45": [
        "<tool_call>", "</tool_call>", "weather", "add", "\n", "<arg_key>city</arg_key>", "<arg_key>", "days", "</arg_key>",
        "<arg_value>", "2", "</arg_value>", "Kiel", "Good day. ",
    ],
    "pythonic": [
        "[", "]", "weather(", "add(", ")", ", ", 'city="Ki, el)"', "city='Kiel'", "days=2", "units={'a': [None, True]}", "=", "(",
        "<|tool_call_start|>", "<|tool_call_end|>", "<|python_start|>", "'", "\\", "Good day. ",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
        "<|tool_call_argument_begin|>", "functions.weather:0", "add:1", "\n", ARGUMENTS, "Good day. ",
    ],
    "minimax_m2": [
        "<minimax:tool_call>", "</minimax:tool_call>", "\n", '<invoke name="weather">', '<invoke name="add">\n', "</invoke>",
        '<parameter name="city">', "Kiel", "</parameter>\n", '<parameter name="days">', "2", '<parameter name="', '">',
        "Good day. ",
    ],
    "gemma4": [
        "<|tool_call>", "<tool_call|>", "call:", "weather{", "add{", "}", ",", "city:", '<|"|>', '<|"|>Ki, }<|"|>', "days:2",
        "units:{a:[null,true]}", ":", "[", "]", "Good day. ",
    ],
    "minimax": ["<tool_calls>", "</tool_calls>", "\n", OBJECT, '{"name": "add"}', "{", "Good day. "],
    "cohere_command3": [
        "<|START_ACTION|>", "<|END_ACTION|>", "[", "]", ",\n", '{"tool_call_id": "0", ', '"tool_name": "weather", ',
        f'"parameters": {ARGUMENTS}', "}", OBJECT, "Good day. ",
    ],
    "mistral": ["[TOOL_CALLS]", "[", "]", OBJECT, ", ", "weather", "[ARGS]", "[CALL_ID]Ab3dE6gHi", ARGUMENTS, "Good day. "],
}  # fmt: skip
CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEP = PIECES["deepseek_v3"][:5]
FENCED = f"{CALL_BEGIN}function{SEP}weather\n```json\n{ARGUMENTS}\n```{CALL_END}"
TAGS = (
    '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Kiel }" \\</arg_value>\n<arg_key>days</arg_key>\n'
    "<arg_value>2</arg_value>\n</tool_call>"
)
SECTION, SECTION_END, KIMI_CALL, KIMI_END, KIMI_ARGUMENTS = PIECES["kimi_k2"][:5]
KIMIS = f"{KIMI_CALL}functions.weather:0{KIMI_ARGUMENTS}{ARGUMENTS}{KIMI_END}"
INVOKE = '<invoke name="weather">\n<parameter name="city">Kiel }" \\</parameter>\n<parameter name="days">2</parameter>\n</invoke>'
MINI, MINI_END = PIECES["minimax_m2"][:2]
ACTION = f'{{"tool_call_id": "0", "tool_name": "weather", "parameters": {ARGUMENTS}}}'
GEMMAS = '<|tool_call>call:weather{city:<|"|>Kiel }" \\<|"|>,days:2}<tool_call|>'
PYTHON = "weather( city = 'Kiel }\" \\\\', days=2 )"
XML = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nKiel }" \\\n</parameter>\n<parameter=days>\n2\n</parameter>\n'
    "</function>\n</tool_call>"
)


@pytest.mark.parametrize("name", PIECES)
@settings(max_examples=60, deadline=None)
@given(data=strategies.data())
def test_parts_are_the_same_for_every_cut(name, data) -> None:
    text = data.draw(texts(PIECES[name]))
    reader = NAMES[name].reader
    due = parts_of(reader(TOOLS), [text])
    assert parts_of(reader(TOOLS), [*text]) == due
    for cut in range(0, len(text), 3):
        assert parts_of(reader(TOOLS), [text[:cut], text[cut:]]) == due, cut
    _check_order(due)


def _check_order(parts) -> None:
    """Calls are counted from 0, do not overlap, and have one end each; what has a right end is a JSON object."""
    open_, count, arguments = None, 0, ""
    for part in parts:
        match part:
            case CallStart(index, name):
                assert (open_, index) == (None, count)
                assert name
                open_, count, arguments = index, count + 1, ""
            case CallArguments(index, text):
                assert index == open_
                arguments += text
            case CallEnd(index):
                assert index == open_
                assert isinstance(json.loads(arguments), dict)
                open_ = None
            case CallBroken(index, why):
                assert index == open_
                assert why
                open_ = None
            case Content(text):
                assert text
    assert open_ is None


CASES = [
    (HERMES, f"<tool_call>\n{OBJECT}\n</tool_call>", "", 1),
    (HERMES, f"I look.\n\n<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>\n{OBJECT}\n</tool_call>\n", "I look.", 2),
    (HERMES, f"<tool_call>{OBJECT}</tool_call> Done. ", " Done. ", 1),
    (HERMES, f"<tool_call>[{OBJECT},\n{OBJECT}]</tool_call>", "", 2),
    (HERMES, f'<tool_call>{{"arguments": {ARGUMENTS}, "id": "x", "name": "weather"}}', "", 1),
    (HERMES, f'<tool_call>{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}', "", 1),
    (HERMES, "<tool_call>\n" + OBJECT[:-1], "", 1),
    (LLAMA, OBJECT, "", 1),
    (LLAMA, "<|python_tag|>" + OBJECT.replace("arguments", "parameters") + "; " + OBJECT, "", 2),
    (LLAMA, '\n {"type": "function", "name": "weather", "parameters": ' + ARGUMENTS + "}", "", 1),
    (MISTRAL, f"[TOOL_CALLS][{OBJECT}, {OBJECT}]", "", 2),
    (MISTRAL, f"Look: [TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]weather{ARGUMENTS}", "Look:", 2),
    (MISTRAL, f"[TOOL_CALLS]weather[CALL_ID]Ab3dE6gHi[ARGS]{ARGUMENTS}", "", 1),
    (GRANITE, f"<|tool_call|>[{OBJECT}, {OBJECT}]", "", 2),
    (GRANITE, f"Look. <tool_call> [{OBJECT}]", "Look.", 1),
    (PHI, f"functools[{OBJECT}]", "", 1),
    (PHI, f"I have functools. <|tool_call|>[{OBJECT},{OBJECT}]<|/tool_call|>", "I have functools.", 2),
    (QWEN, f"Look.\n{XML}\n{XML}", "Look.", 2),
    (QWEN, f"{XML[12:-13]} Done", " Done", 1),
    (QWEN, XML.replace("\n2\n", "2").replace("<parameter=days>", "\n<parameter=days> "), "", 1),
    (GLM, f"Look.\n{TAGS}\n{TAGS}", "Look.", 2),
    (GLM, TAGS.replace("\n", "") + "Done", "Done", 1),
    (PYTHONIC, "[weather(city='Kiel }\" \\\\', days=2)]", "", 1),
    (PYTHONIC, f"[{PYTHON}, {PYTHON}]", "", 2),
    (PYTHONIC, f"I look: <|tool_call_start|>[ {PYTHON} ]<|tool_call_end|>Done", "I look:Done", 1),
    (PYTHONIC, f"<|python_start|>[{PYTHON},{PYTHON}]<|python_end|>", "", 2),
    (GEMMA, f"Look.{GEMMAS}{GEMMAS}", "Look.", 2),
    (GEMMA, GEMMAS.replace(",days:", ", days: ").replace("city", '<|"|>city<|"|>').replace("<tool_call|>", " Done"), " Done", 1),
    (KIMI, f"So. {SECTION}{KIMIS}\n{KIMIS}{SECTION_END}", "So.", 2),
    (KIMI, f"{KIMIS}{SECTION_END} Done", " Done", 1),
    (KIMI, f"{SECTION}{KIMIS}{SECTION_END}{SECTION_END}", "", 1),
    (KIMI, SECTION + KIMIS.replace("functions.", "").replace(":0", ":0 "), "", 1),
    (MINIMAX, f"Look.\n{MINI}\n{INVOKE}\n{INVOKE}\n{MINI_END}\n", "Look.", 2),
    (MINIMAX, f"{MINI}{INVOKE}", "", 1),
    (M1, f"Look. <tool_calls>\n{OBJECT}\n{OBJECT}\n</tool_calls>", "Look.", 2),
    (M1, f"<tool_calls>{OBJECT}</tool_calls> Done", " Done", 1),
    (COHERE, f"<|START_ACTION|>[\n    {ACTION},\n    {ACTION}\n]<|END_ACTION|>", "", 2),
    (COHERE, "I look. <|START_ACTION|>" + ACTION.replace('"tool_call_id": "0", ', ""), "I look.", 1),
    (DEEPSEEK, f"So:{CALLS_BEGIN}{FENCED}\n{FENCED}{CALLS_END}", "So:", 2),
    (DEEPSEEK, f"{CALLS_BEGIN}{CALL_BEGIN}weather{SEP}{ARGUMENTS}{CALL_END}{CALLS_END}", "", 1),
]


@pytest.mark.parametrize(("reader", "text", "content", "count"), CASES)
def test_calls(reader, text, content, count) -> None:
    found, calls, broken = said(reader, text)
    assert found == content
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", json.loads(ARGUMENTS))] * count
    assert broken == [None] * count


@pytest.mark.parametrize(
    ("reader", "text", "content"),
    [
        (HERMES, "a < b, <tool and <tool_cal", None),
        (HERMES, " two spaces \n", None),
        (HERMES, "<tool_call>\nhello</tool_call>", None),
        (HERMES, '<tool_call>{"name": ""}</tool_call>', None),
        (HERMES, '<tool_call>{"name": "a\\nb", "arguments": {}}', None),
        (HERMES, '<tool_call>{"name": "' + "x" * 65 + '", "arguments": {}}', None),
        (HERMES, '<tool_call>{"nam', None),
        (LLAMA, '{"name": "Bob", "parameters": {}}', None),
        (LLAMA, '{"answer": {"name": "add"}}', None),
        (LLAMA, 'Use {"name": "add", "parameters": {}}', None),
        (LLAMA, "<|python_tag|>print(1)", "print(1)"),
        (MISTRAL, "[TOOL_CALLS]hello", "hello"),
        (MISTRAL, "A [TOOL", None),
        (QWEN, "a <tool_call>\n<func", None),
        (QWEN, "a <function=b c>d", None),
        (QWEN, "if a <functions: b", None),
        (GRANITE, "<|tool_call|> none", " none"),
        (PYTHONIC, "[1, 2]", None),
        (GLM, "a <tool_call>b c</tool_call>", None),
        (PYTHONIC, "[wither(city='x')]", None),
        (PYTHONIC, "So [weather(city='x')]", None),
        (PYTHONIC, "[weather", None),
        (PYTHONIC, "<|tool_call_start|>weather", "weather"),
        (PHI, "functools[1] of functools", None),
        (GEMMA, "<|tool_call>weather{}", "weather{}"),
        (GEMMA, "a <|tool_cal", None),
        (GEMMA, "<|tool_call>call:no name{}", "call:no name{}"),
        (KIMI, f"{SECTION}none", "none"),
        (KIMI, f"a {SECTION[:-1]}", None),
        (KIMI, f"{KIMI_CALL}no name{KIMI_ARGUMENTS}{{}}", f"no name{KIMI_ARGUMENTS}" + "{}"),
        (MINIMAX, f"a {MINI} and <invoke name=b>", None),
        (MINIMAX, 'an <invoke name="add"> alone', None),
        (M1, "a <tool_calls> none</tool_calls>", None),
        (COHERE, '<|START_ACTION|>[{"name": "add"}]', '[{"name": "add"}]'),
        (DEEPSEEK, f"{CALLS_BEGIN}none", "none"),
        (DEEPSEEK, CALLS_BEGIN[:-1], None),
    ],
)
def test_what_is_no_call_is_content(reader, text, content) -> None:
    assert said(reader, text) == (text if content is None else content, [], [])


@pytest.mark.parametrize(
    ("reader", "text", "arguments"),
    [
        (HERMES, '<tool_call>{"name": "add", "arguments": {"city": "Ki', '{"city": "Ki'),
        (HERMES, '<tool_call>{"name": "add", "argum', ""),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a" 1}}</tool_call>', '{"a" 1}'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', '{"a": NaN}'),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', ""),
        (HERMES, '<tool_call>{"name": "add", "arguments": ' + "[" * 9 + "</tool_call>", ""),
        (LLAMA, '{"name": "add", "parameters": {"a', '{"a'),
        (MISTRAL, "[TOOL_CALLS]add[ARGS]{", "{"),
        (QWEN, "<tool_call><function=add>\n<parameter=a>\nx\ny\n</param", '{"a": "x\\ny'),
        (QWEN, "<function=add><parameter=a>1</parameter>", '{"a": "1"'),
        (QWEN, "<function=add>hello</function></tool_call>", ""),
        (QWEN, "<function=add><parameter=a>1</parameter><parameter=a>", '{"a": "1"'),
        (PYTHONIC, "[add(a='x", '{"a": '),
        (PYTHONIC, "[add(a=1, b", '{"a": 1'),
        (PYTHONIC, "[add(a=f(1))]", '{"a": '),
        (PYTHONIC, "[add(a=1, a=2)]", '{"a": 1'),
        (PYTHONIC, "[add(a=" + "[" * 100_000, '{"a": '),
        (PYTHONIC, "[add(a=1e999)]", '{"a": '),
        (PYTHONIC, "[add(a={1: 2})]", '{"a": '),
        (PYTHONIC, "[add(a=b'x')]", '{"a": '),
        (GLM, "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>x\n</arg_v", '{"a": "x\\n'),
        (GLM, "<tool_call>add<arg_key>a</arg_key>1</tool_call>", ""),
        (GRANITE, '<|tool_call|>[{"name": "add", "arguments": {"a"', '{"a"'),
        (DEEPSEEK, f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}add\n```json\n{{", "{"),
        (DEEPSEEK, f"{CALLS_BEGIN}{CALL_BEGIN}add{SEP}{{}}and{CALLS_END}", "{}"),
        (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {}', "{}"),
        (GEMMA, '<|tool_call>call:add{a:<|"|>x\n<|"', '{"a": "x\\n'),
        (GEMMA, '<|tool_call>call:add{a:[<|"|>x', '{"a": '),
        (GEMMA, "<|tool_call>call:add{a:1,b", '{"a": 1'),
        (GEMMA, "<|tool_call>call:add{a:1,a:2}<tool_call|>", '{"a": 1'),
        (GEMMA, "<|tool_call>call:add{a:b}<tool_call|>", '{"a": '),
        (GEMMA, "<|tool_call>call:add{a:1e999}<tool_call|>", '{"a": '),
        (GEMMA, "<|tool_call>call:add{a:" + "[" * 100_000, '{"a": '),
        (KIMI, f'{SECTION}{KIMI_CALL}functions.add:0{KIMI_ARGUMENTS}{{"a": 1', '{"a": 1'),
        (KIMI, f"{SECTION}{KIMI_CALL}add:0{KIMI_ARGUMENTS}{{}}and{SECTION_END}", "{}"),
        (MINIMAX, f'{MINI}<invoke name="add"><parameter name="a">x\n</param', '{"a": "x\\n'),
        (MINIMAX, f'{MINI}<invoke name="add">hello</invoke>{MINI_END}', ""),
        (M1, '<tool_calls>{"name": "add", "arguments": {"a"', '{"a"'),
        (COHERE, '<|START_ACTION|>[{"tool_name": "add", "parameters": {"a"', '{"a"'),
    ],
)
def test_a_broken_call_is_told(reader, text, arguments) -> None:
    content, ((name, found),), (why,) = said(reader, text)
    assert (content, name, found) == ("", "add", arguments)
    assert (why is None) == (arguments == "{}" and "and" not in text)


def test_arguments_are_passed_on_as_they_come() -> None:
    reader = HERMES(TOOLS)
    assert reader.feed('<tool_call>{"name": "weather", "arguments": {"city"') == [
        CallStart(0, "weather"), CallArguments(0, '{"city"'),
    ]  # fmt: skip
    assert reader.feed(': "K') == [CallArguments(0, ': "K')]
    assert reader.feed('iel"}}') == [CallArguments(0, 'iel"}'), CallEnd(0)]


def test_a_text_has_the_type_of_its_schema() -> None:
    root = {"$defs": {"n": {"type": "integer"}}, "properties": {"self": {"$ref": "#/properties/self"}}}
    cases = [
        ("2", {"type": "integer"}, 2), ("2", {"type": "string"}, "2"), ("2", {"type": "number"}, 2),
        ("2.5", {"type": "integer"}, "2.5"),
        ("True", {"type": "boolean"}, True), ("false", {"type": ["boolean", "null"]}, False),
        ("None", {"type": "string"}, "None"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None), ("NaN", {"type": "number"}, "NaN"),
        ("[1", {"type": "array"}, "[1"), ('{"a": 1}', {}, {"a": 1}), ("a b", {}, "a b"), ("7", {"$ref": "#/$defs/n"}, 7),
        ("7", {"$ref": "#/properties/self"}, 7), ("7", {"$ref": "#/x/y"}, 7), ("b", {"enum": ["a", "b"]}, "b"), ("7", True, 7),
        ("7", {"enum": [7, 8]}, 7), ("[" * 10_000, {"type": "array"}, "[" * 10_000), ("", {"type": "string"}, ""),
    ]  # fmt: skip
    for text, schema, due in cases:
        assert json.loads(value_of(text, schema, root)) == due, (text, schema)


JSON = strategies.recursive(
    strategies.one_of(
        strategies.none(), strategies.booleans(), strategies.integers(), strategies.floats(allow_nan=False, allow_infinity=False),
        strategies.text(strategies.characters(exclude_categories=["Cs"])),
    ),
    lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text("a'\"\\\n,)}", max_size=5), inner),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(value=JSON, more=strategies.sampled_from([")", ", b=1)", "]", " )"]))
def test_literals_of_python_are_read_to_their_end(value, more) -> None:
    for text in (repr(value), json.dumps(value, ensure_ascii=False)):
        reader = PYTHONIC(TOOLS)
        parts = parts_of(reader, f"[add(a={text}{more}")
        (arguments,) = (part.text for part in parts if isinstance(part, CallArguments))
        found, _ = json.JSONDecoder().raw_decode(arguments.removeprefix('{"a": '))
        assert found == value


def test_strings_in_tags_are_passed_on_as_they_come() -> None:
    reader = QWEN(TOOLS)
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nKi"
    assert reader.feed(text)[-1] == CallArguments(0, "Ki")
    assert reader.feed("el\n</para") == [CallArguments(0, "el")]
    assert reader.feed("meter>") == [CallArguments(0, '"')]


def test_hostile_texts_end() -> None:
    """Deep nesting, and very many marks in one text, take no long time and raise nothing."""
    deep = '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}</tool_call>"
    _, calls, (why,) = said(HERMES, deep)
    assert len(calls) == 1
    assert why is not None
    content, calls, _ = said(HERMES, "<tool_call>" * 20_000)
    assert (len(content), calls) == (11 * 20_000, [])
