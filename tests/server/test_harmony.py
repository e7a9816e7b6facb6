"""gpt-oss over the wires: thoughts, calls and answers of its channels, through the official clients, and in `LLM.chat`."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest

from rooftile.engine import LLM, SamplingParams
from rooftile.engine.chat.harmony.header import MARKS
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput
from tests.server.asking import CHATS, refused
from tests.server.harmony import AGAIN, call, final, harmony_folder, harmony_server, thought
from tests.server.tools import ADD, WEATHER

ASK = [{"role": "user", "content": "How warm?"}]
ARGUMENTS = '{"city": "Kiel", "days": 2}'
LOOKS = thought("They ask.") + call("weather", ARGUMENTS)
SAYS = thought("Seven.") + thought("Degrees.") + final("It is 7 degrees.\n")
RULES = (('"7 degrees"', SAYS), ("How warm?", LOOKS), ("", final("Hm.")))
RESULTS = {"weather": lambda city, days=1: "7 degrees", "add": lambda a, b: str(a + b)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Any:
    return harmony_folder(tmp_path_factory.mktemp("harmony") / "tiny")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with harmony_server(folder, tmp_path_factory.mktemp("script")) as made:
        made.say(*RULES)
        yield made


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made


def create(client, **asked):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": ASK, "tools": [WEATHER, ADD], "max_tokens": 300} | asked
    )


def test_a_call_behind_a_thought(client, server) -> None:
    found = create(client)
    (choice,) = found.choices
    assert (choice.finish_reason, choice.message.content, choice.message.reasoning_content) == ("tool_calls", None, "They ask.")
    (said,) = choice.message.tool_calls
    assert (said.function.name, said.function.arguments) == ("weather", ARGUMENTS)
    # the letters of the thought, and no mark
    assert 0 < found.usage.completion_tokens_details.reasoning_tokens <= len("They ask.")


def test_a_stream_has_the_parts_of_the_whole(client, server) -> None:
    reasoning, arguments, names, ends = "", "", [], []
    usage = None
    for chunk in create(client, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            assert not choice.delta.content
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            ends.append(choice.finish_reason)
            for each in choice.delta.tool_calls or ():
                names += [each.function.name] if each.id is not None else []
                arguments += each.function.arguments
    assert (reasoning, names, arguments) == ("They ask.", ["weather"], ARGUMENTS)
    assert ends == [None] * (len(ends) - 1) + ["tool_calls"]
    assert usage.completion_tokens_details == create(client).usage.completion_tokens_details


def test_several_thoughts_are_counted(client, server) -> None:
    messages = [{"role": "user", "content": 'What is "7 degrees"?'}]
    whole = create(client, messages=messages, tools=openai.omit)
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content) == ("It is 7 degrees.\n", "Seven.\n\nDegrees.")
    due = whole.usage.completion_tokens_details.reasoning_tokens
    counts = [
        chunk.usage.completion_tokens_details.reasoning_tokens
        for chunk in create(
            client, messages=messages, tools=openai.omit, stream=True, stream_options={"continuous_usage_stats": True}
        )
        if chunk.usage is not None
    ]
    assert counts == sorted(counts)
    assert counts[-1] == due > 4


@pytest.mark.parametrize(
    ("fields", "content"),
    [({"stop": ["degr"]}, "It is 7 "), ({"n": 2}, None), ({"logprobs": True}, None), ({"include_reasoning": False}, None)],
)
def test_parts_with_what_else_is_asked(server, fields, content) -> None:
    """A stop string is found in the text behind the thought, where the engine makes the text."""
    body = {"messages": [{"role": "user", "content": '"7 degrees"'}], "max_tokens": 300, "temperature": 0} | fields
    choices = server.post(CHATS, body).json()["choices"]
    assert len(choices) == fields.get("n", 1)
    for choice in choices:
        assert choice["message"]["content"] == (content or "It is 7 degrees.\n")
        due = None if "include_reasoning" in fields else "Seven.\n\nDegrees."
        assert choice["message"].get("reasoning_content") == due
        if "logprobs" in fields:
            assert "".join(token["token"] for token in choice["logprobs"]["content"]).startswith(SAYS)
    streamed = {"content": "", "reasoning_content": ""}
    for event in server.events(CHATS, **body):
        for choice in event["choices"]:
            for name in streamed if choice["index"] == 0 else ():
                streamed[name] += choice["delta"].get(name) or ""
    assert streamed == {"content": content or "It is 7 degrees.\n", "reasoning_content": due or ""}


@pytest.mark.parametrize("streams", [False, True])
def test_a_loop_ends_in_an_answer(client, server, streams) -> None:
    messages: list[Any] = list(ASK)
    for _ in range(2):
        if streams:
            with client.chat.completions.stream(model="tiny", messages=messages, tools=[WEATHER, ADD], max_tokens=300) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = create(client, messages=messages).choices[0].message
        messages.append(message)
        for each in message.tool_calls or ():
            said = RESULTS[each.function.name](**json.loads(each.function.arguments))
            messages.append({"role": "tool", "tool_call_id": each.id, "content": said})
    assert message.content == "It is 7 degrees.\n"
    assert not message.tool_calls


def test_what_the_model_reads(client, server, folder) -> None:
    """One call per message, with its result behind it, and thoughts by the template's name."""
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in (("a", "weather", '{"city": "Kiel"}'), ("b", "add", '{"a": 1, "b": 2}'))
    ]
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}, *ASK,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "3"}, {"role": "tool", "tool_call_id": "a", "content": "7 degrees"},
    ]  # fmt: skip
    body = {"return_token_ids": True}
    found = create(client, messages=messages, reasoning_effort="high", tools=[WEATHER], extra_body=body)
    assert found.choices[0].message.content == "It is 7 degrees.\n"
    ids = found.prompt_token_ids
    own = Tokenizer.from_folder(folder)
    assert own.decode(ids, skip_special=False) == (
        "<|start|>system<|message|>Reasoning: high type weather = any;<|end|>"
        "<|start|>developer<|message|>Be brief.\n\nBe kind.<|end|>"
        "<|start|>user<|message|>How warm?<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Kiel"}<|call|>'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"7 degrees"<|end|>'
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>'
        f'<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>{AGAIN}'
    )
    for effort in ("none", "minimal", "max"):
        why = refused(server, CHATS, {"messages": ASK, "reasoning_effort": effort}, "invalid_value")
        assert f"reasoning_effort is '{effort}'; this model has low, medium, high" in why


def test_a_call_that_is_cut_off_is_told(client, server) -> None:
    whole = create(client).usage.completion_tokens
    (choice,) = create(client, max_tokens=whole - 8).choices
    assert choice.finish_reason == "length"
    (said,) = choice.message.tool_calls
    assert ARGUMENTS.startswith(said.function.arguments)
    assert said.function.arguments != ARGUMENTS


def test_calls_follow_their_schemas(client, server) -> None:
    """A call that is required comes behind the thought, and one that the model begins has the function's arguments."""
    pytest.importorskip("llguidance")
    named = {"type": "function", "function": {"name": "add"}}
    server.say(("", thought("They ask.") + final("I would rather talk.")))
    try:
        (choice,) = create(client, tool_choice=named, max_tokens=600, seed=2, parallel_tool_calls=False).choices
        assert choice.message.reasoning_content == "They ask."
        assert choice.message.content is None
        (said,) = choice.message.tool_calls
        assert said.function.name == "add"
        if choice.finish_reason == "tool_calls":
            assert json.loads(said.function.arguments).keys() == {"a", "b"}
        server.say(("", thought("to=functions.none") + call("weather", '{"town": "Kiel"}')))
        (choice,) = create(client, max_tokens=600, seed=2).choices
        assert choice.message.reasoning_content == "to=functions.none"
        (said,) = choice.message.tool_calls
        assert said.function.arguments.lstrip("{ \n\r\t").startswith('"city"')
    finally:
        server.say(*RULES)


def test_an_answer_that_is_continued(client, server) -> None:
    messages = [*ASK, {"role": "assistant", "content": "It is"}]
    server.say(("final<|message|>It is", " warm."))
    try:
        body = {"continue_final_message": True, "add_generation_prompt": False}
        found = create(client, messages=messages, tools=openai.omit, extra_body=body)
    finally:
        server.say(*RULES)
    assert found.choices[0].message.content == " warm."


def test_the_other_wires_have_the_same_parts(client, server) -> None:
    tool = {"type": "function", "name": "weather", "parameters": WEATHER["function"]["parameters"]}
    first = client.responses.create(model="tiny", input="How warm?", tools=[tool], max_output_tokens=300)
    reasoning, called = first.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "They ask.")
    assert (called.type, called.name, called.arguments) == ("function_call", "weather", ARGUMENTS)
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "7 degrees"}
    events = [*client.responses.create(
        model="tiny", input=[result], previous_response_id=first.id, tools=[tool], max_output_tokens=300, stream=True,
    )]  # fmt: skip
    assert events[-1].response.output_text == "It is 7 degrees.\n"
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]

    body = {"model": "tiny", "max_tokens": 300, "tools": [{"name": "weather", "input_schema": tool["parameters"]}]}
    answer = server.post("/v1/messages", body | {"messages": ASK}).json()
    blocks = answer["content"]
    assert [(block["type"], block.get("thinking") or block["input"]) for block in blocks] == [
        ("thinking", "They ask."), ("tool_use", json.loads(ARGUMENTS)),
    ]  # fmt: skip
    assert answer["stop_reason"] == "tool_use"
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": blocks[1]["id"], "content": "7 degrees"}]}
    answer = server.post("/v1/messages", body | {"messages": [*ASK, {"role": "assistant", "content": blocks}, result]}).json()
    assert [block.get("text") for block in answer["content"]] == [None, "It is 7 degrees.\n"]


def test_the_library_reads_the_same(folder) -> None:
    llm = LLM(folder, device="cpu", num_blocks=200, max_model_len=2048)
    own = llm.get_tokenizer()
    never = dict.fromkeys(own.encode("".join(MARKS), special=False), -math.inf)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias=never)
    # a text without a header is content
    (output,) = llm.chat(ASK, params, tools=[WEATHER])
    assert (output.outputs[0].content, output.outputs[0].tool_calls) == (output.outputs[0].text, [])
    (output,) = llm.chat([*ASK, {"role": "assistant", "content": "It is"}], params, continue_final_message=True)
    assert (output.outputs[0].content, output.outputs[0].reasoning) == (output.outputs[0].text, None)
    with pytest.raises(InvalidInput, match="reasoning_effort is 'none'; this model has low, medium, high"):
        llm.chat(ASK, params, chat_template_kwargs={"reasoning_effort": "none"})
