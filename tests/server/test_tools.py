"""Calls of functions through the official client, with a model that says what a script has."""

from __future__ import annotations

import json
import re

import openai
import pytest

from rooftile.engine import LLM, SamplingParams
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput
from tests.server.tools import ADD, HERMES, WEATHER, hermes_call, tools_server

ASK = [{"role": "user", "content": "How warm?"}]
CALL = hermes_call("weather", city="Kiel", days=2)
FUNCTION = WEATHER["function"]


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with tools_server(folder, tmp_path_factory.mktemp("script")) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made


def create(client, **asked):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": ASK, "tools": [WEATHER, ADD], "max_tokens": 200} | asked
    )


def test_a_call_is_apart_from_content(client, server) -> None:
    server.say(("", f"I look.\n{CALL}"))
    (choice,) = create(client).choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Kiel", "days": 2},
    )
    assert len(call.id) == 9
    server.say(("", CALL))
    assert create(client).choices[0].message.content is None
    # without tools, and where none may be called, it is text like any other
    assert create(client, tools=openai.omit).choices[0].message.content == CALL
    assert create(client, tool_choice="none").choices[0].message.content == CALL
    server.say(("", "Warm."))
    (choice,) = create(client).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("Warm.", None, "stop")


def test_a_stream_has_the_parts_of_the_whole(client, server) -> None:
    server.say(("", f"I look.\n{CALL}\n{hermes_call('add', a=1, b=2)}"))
    content, calls, ends = "", [], []
    for chunk in create(client, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        ends.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(calls)
                assert call.type == "function"
                calls.append([call.id, call.function.name, [call.function.arguments]])
            else:
                assert call.index == len(calls) - 1
                calls[-1][2].append(call.function.arguments)
    assert content == "I look."
    assert ends == [None] * (len(ends) - 1) + ["tool_calls"]
    assert [(name, json.loads("".join(pieces))) for _, name, pieces in calls] == [
        ("weather", {"city": "Kiel", "days": 2}), ("add", {"a": 1, "b": 2}),
    ]  # fmt: skip
    assert len(calls[0][2]) > 3
    assert len({call[0] for call in calls}) == 2


def test_a_call_that_is_required_follows_a_schema(client, server) -> None:
    """The script begins a text, and the grammar leaves it no choice but a call."""
    server.say(("", "I would rather talk."))
    for choice, names in (("required", {"weather", "add"}), ({"type": "function", "function": {"name": "add"}}, {"add"})):
        for several in (openai.omit, False):
            (found,) = create(client, tool_choice=choice, parallel_tool_calls=several, max_tokens=400, seed=3).choices
            if found.finish_reason == "length":
                continue
            assert (found.finish_reason, found.message.content) == ("tool_calls", None)
            assert {call.function.name for call in found.message.tool_calls} <= names
            assert len(found.message.tool_calls) == 1 or several is openai.omit
            for call in found.message.tool_calls:
                due = {"weather": {"city"}, "add": {"a", "b"}}[call.function.name]
                assert json.loads(call.function.arguments).keys() >= due


def test_a_call_that_has_begun_follows_a_schema(client, server, folder) -> None:
    """The script goes on wrongly behind the mark, and the grammar brings it back."""
    own = Tokenizer.from_folder(folder)
    ending = {str(id): 5 for id in range(own.vocab_size) if own.text_of(id) in ('"', "}", "1")}
    wrong = CALL.replace("city", "town").replace("weather", "wither")
    server.say(("", f"I look.\n{wrong}\n{hermes_call('add', a=1, b=2)}"))
    for stream in (False, True):
        made = create(client, max_tokens=600, seed=4, stream=stream, logit_bias=ending)
        if stream:
            deltas = [chunk.choices[0].delta for chunk in made]
            content = "".join(delta.content or "" for delta in deltas)
            pieces = [call for delta in deltas for call in delta.tool_calls or ()]
            found = [
                (c.function.name, "".join(p.function.arguments for p in pieces if p.index == c.index)) for c in pieces if c.id
            ]
        else:
            message = made.choices[0].message
            content, found = message.content, [(call.function.name, call.function.arguments) for call in message.tool_calls]
        assert content.startswith("I look.")
        name, arguments = found[0]
        assert json.loads(arguments).keys() >= {"weather": {"city"}, "add": {"a", "b"}}[name]
    two = f"{CALL}\n{CALL}"
    server.say(("", two))
    assert len(create(client).choices[0].message.tool_calls) == 2
    (choice,) = create(client, parallel_tool_calls=False, n=1).choices
    assert (choice.finish_reason, len(choice.message.tool_calls)) == ("tool_calls", 1)
    # a strict function must have a schema that a grammar follows
    strict = {"type": "function", "function": FUNCTION | {"strict": True, "parameters": {"type": "object", "not": {}}}}
    with pytest.raises(openai.BadRequestError, match="the schema has not, which is not supported") as error:
        create(client, tools=[strict])
    assert error.value.param == "tools"


def test_a_required_call_ends(folder) -> None:
    """Also of a model that likes spaces: white space between two parts is bounded."""
    llm = LLM(folder, device="cpu", chat_template=HERMES, max_model_len=2048, num_blocks=400)
    space = llm.get_tokenizer().encode(" ", False)[-1]
    params = SamplingParams(temperature=0, max_tokens=600, logit_bias={space: 100.0})
    (output,) = llm.chat(ASK, params, tools=[ADD], tool_choice={"type": "function", "function": {"name": "add"}})
    (answer,) = output.outputs
    assert 25 > max(len(run) for run in re.findall(" +", answer.text)) > 10


def test_a_loop_of_two_calls_ends_in_an_answer(client, server) -> None:
    results = {"weather": lambda city, days=1: f"{city}: 7 degrees", "add": lambda a, b: str(a + b)}
    server.say(
        ("tool: 10", "Ten degrees."), ("Kiel: 7 degrees", hermes_call("add", a=7, b=3)), ("How warm?", f"I look.\n{CALL}"),
    )  # fmt: skip
    for streams in (False, True):
        messages, turns = list(ASK), 0
        while True:
            if streams:
                with client.chat.completions.stream(
                    model="tiny", messages=messages, tools=[WEATHER, ADD], max_tokens=200
                ) as events:
                    for _ in events:
                        pass
                    message = events.get_final_completion().choices[0].message
            else:
                message = create(client, messages=messages).choices[0].message
            messages.append(message)
            turns += 1
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                said = results[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
        assert (turns, message.content) == (3, "Ten degrees.")


def test_a_call_that_is_cut_off_is_told(client, server) -> None:
    server.say(("", CALL))
    whole = create(client).usage.completion_tokens
    for stream in (False, True):
        made = create(client, max_tokens=whole - 12, stream=stream)
        if stream:
            chunks = [chunk.choices[0] for chunk in made]
            finish = chunks[-1].finish_reason
            arguments = "".join(c.function.arguments for chunk in chunks for c in chunk.delta.tool_calls or ())
        else:
            finish, arguments = made.choices[0].finish_reason, made.choices[0].message.tool_calls[0].function.arguments
        assert finish == "length"
        assert arguments
        assert json.dumps({"city": "Kiel", "days": 2}).startswith(arguments.rstrip())


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"tools": [WEATHER] * 129}, "tools has 129 functions; may have at most 128"),
        ({"tools": [WEATHER] * 10_000}, "tools has 10,000 functions; may have at most 128"),
        ({"tools": [WEATHER, WEATHER]}, "tools has two functions of the name weather"),
        ({"tools": {}}, "tools is of type dict; must be a list of functions"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\] is .*web_search"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] has no function"),
        (
            {"tools": [{"type": "function", "function": FUNCTION | {"name": "a\nb"}}]},
            r"tools\[0\].function.name is 'a\\nb'; must be",
        ),
        ({"tools": [{"type": "function", "function": FUNCTION | {"name": "x" * 65}}]}, r"tools\[0\].function.name is .*1 to 64"),
        (
            {"tools": [{"type": "function", "function": FUNCTION | {"parameters": []}}]},
            r"parameters is \[\]; must be a JSON schema",
        ),
        (
            {"tools": [{"type": "function", "function": FUNCTION | {"parameters": {"type": "array"}}}]},
            "type is 'array'; must be object",
        ),
        (
            {"tools": [{"type": "function", "function": FUNCTION | {"description": "x" * 300_000}}]},
            "tools has 300,.* bytes; may have",
        ),
        ({"tools": [{"type": "function", "function": FUNCTION | {"x": 1}}]}, r"tools\[0\].function has 'x'; has name"),
        ({"tool_choice": "any"}, "tool_choice is 'any'; must be none, auto, required, or"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice names 'sub', which is none of tools"),
        ({"tool_choice": {"type": "function", "function": {"name": []}}}, r"tool_choice.function.name is \[\]; must be the name"),
        ({"tool_choice": {"type": "function"}}, "tool_choice is .*; must be none, auto"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice asks for a call, and there are no tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls is 1; must be true or false"),
    ],
)  # fmt: skip
def test_hostile_tools_are_refused_in_a_sentence(server, asked, why) -> None:
    answer = server.post("/v1/chat/completions", {"model": "tiny", "messages": ASK, "tools": [WEATHER]} | asked)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] in ("tools", "tool_choice", "parallel_tool_calls")
    assert re.search(why, error["message"]), error["message"]


def test_a_deep_schema_is_refused(server) -> None:
    deep: dict = {"type": "object"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    answer = server.post("/v1/chat/completions", {"messages": ASK, "tools": [tool]})
    assert (answer.status_code, "deeper than" in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "tool", "content": "x"}, "tool_call_id is None; must be a text of 1 to 128 characters"),
        ({"role": "tool", "content": "x", "tool_call_id": "x" * 129}, "tool_call_id is "),
        ({"role": "tool", "tool_call_id": "x"}, "content is missing"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, "is of the role 'user' and has tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, "must be an object with id, type function, and function"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "has type dict; must be a list"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "arguments is '{'; must be a JSON",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, r"arguments is \[1\]; must be"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}, "must be a JSON object"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "a b", "arguments": "{}"}}]}, "name is 'a b'; must be"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 200},
            "has 200 calls; must be a list of at most 128",
        ),
    ],
)
def test_hostile_messages_are_refused_in_a_sentence(server, message, why) -> None:
    answer = server.post("/v1/chat/completions", {"messages": [*ASK, message], "tools": [WEATHER]})
    assert answer.status_code == 400, answer.text
    assert re.search(why, answer.json()["error"]["message"]), answer.json()["error"]["message"]


def test_an_llm_calls_functions(folder) -> None:
    llm = LLM(folder, device="cpu", chat_template=HERMES, max_model_len=2048, num_blocks=400)
    found = {}
    for seed in range(4):
        params = SamplingParams(max_tokens=500, seed=seed)
        (output,) = llm.chat(ASK, params, tools=[WEATHER, ADD], tool_choice="required")
        (answer,) = output.outputs
        assert answer.content == ""
        if answer.finish_reason == "stop":
            found[seed] = [call.name for call in answer.tool_calls]
            for call in answer.tool_calls:
                assert call.broken is None
                assert json.loads(call.arguments).keys() >= {"weather": {"city"}, "add": {"a", "b"}}[call.name]
        else:
            # what was broken off is told
            assert answer.tool_calls[-1].broken is not None
    assert found
    assert all(found.values())
    (output,) = llm.chat(ASK, SamplingParams(max_tokens=5, seed=0), tools=[WEATHER])
    assert (output.outputs[0].tool_calls, output.outputs[0].content) == ([], output.outputs[0].text)
    with pytest.raises(InvalidInput, match=r"tools\[0\] has no function"):
        llm.chat(ASK, tools=[{"type": "function"}])
    with pytest.raises(InvalidInput, match="tool_choice asks for a call, and structured for another form"):
        llm.chat(ASK, SamplingParams(structured={"regex": "a"}), tools=[WEATHER], tool_choice="required")
    with pytest.raises(InvalidInput, match="tool_call_parser is 'own'; must be auto, none, or a syntax of calls"):
        LLM(folder, device="cpu", tool_call_parser="own")
