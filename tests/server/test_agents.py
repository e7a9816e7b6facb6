"""Loops of two calls, to their end, by the official clients and their own runners of tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.server.agents import CALLED, QUESTION, SAID, TURNS, Tools
from tests.server.small import KEY
from tests.server.tools import ADD, WEATHER

pytestmark = pytest.mark.filterwarnings("ignore")
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in (WEATHER, ADD)]
ASKED = {"role": "user", "content": QUESTION}


@pytest.fixture(scope="module")
def client(agents):
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key=KEY, max_retries=0, timeout=300) as made:
        yield made


@pytest.fixture(scope="module")
def anthropic_client(agents):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=agents.url, api_key=KEY, max_retries=0, timeout=300) as made:
        yield made


@pytest.fixture
def tools(agents) -> Tools:
    agents.say(*TURNS)
    return Tools()


def ask_for_a_response(client, streams: bool, **asked: Any) -> Any:
    asked = {"model": "tiny", "tools": FUNCTIONS, "max_output_tokens": 200} | asked
    if not streams:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = [event.type for event in stream]
        assert events[0] == "response.created"
        return stream.get_final_response()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_responses_with_what_is_kept_and_with_all_items(client, tools, kept: bool, streams: bool) -> None:
    items, before = [ASKED], openai.omit
    for _ in range(3):
        response = ask_for_a_response(client, streams, input=items, previous_response_id=before, store=kept)
        # with nothing kept, what the model has said goes back as the client has it
        items, before = ([], response.id) if kept else ([*items, *response.output], before)
        calls = [item for item in response.output if item.type == "function_call"]
        for call in calls:
            output = tools.call(call.name, json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
        if not calls:
            break
    assert (response.output_text, tools.called) == (SAID, CALLED)


def test_parsed_calls_of_chats(client, tools) -> None:
    """`parse` asks for strict functions, and reads their arguments itself."""
    import pydantic

    class Weather(pydantic.BaseModel):
        city: str

    class Add(pydantic.BaseModel):
        a: int
        b: int

    functions = [openai.pydantic_function_tool(Weather, name="weather"), openai.pydantic_function_tool(Add, name="add")]
    messages: list[Any] = [ASKED]
    for _ in range(3):
        message = client.chat.completions.parse(model="tiny", messages=messages, tools=functions).choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            said = tools.call(call.function.name, call.function.parsed_arguments.model_dump())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    assert (message.content, tools.called) == (SAID, CALLED)


def test_openais_agents(agents, tools) -> None:
    """Over responses and over chats, whole and streamed."""
    theirs = pytest.importorskip("agents")
    theirs.set_tracing_disabled(True)

    async def run(kind: type, streams: bool) -> str:
        async with openai.AsyncOpenAI(base_url=f"{agents.url}/v1", api_key=KEY, max_retries=0, timeout=300) as client:
            agent = theirs.Agent(
                name="Roofer", model=kind(model="tiny", openai_client=client),
                tools=[theirs.function_tool(tools.weather), theirs.function_tool(tools.add)],
            )  # fmt: skip
            if not streams:
                return (await theirs.Runner.run(agent, QUESTION)).final_output
            result = theirs.Runner.run_streamed(agent, QUESTION)
            async for _ in result.stream_events():
                pass
            return result.final_output

    for kind in (theirs.OpenAIResponsesModel, theirs.OpenAIChatCompletionsModel):
        for streams in (False, True):
            tools.called.clear()
            assert asyncio.run(run(kind, streams)) == SAID
            assert tools.called == CALLED


@pytest.mark.parametrize("streams", [False, True])
def test_anthropics_messages(anthropic_client, tools, streams: bool) -> None:
    functions = [
        {"name": tool["name"], "description": tool.get("description", ""), "input_schema": tool["parameters"]}
        for tool in FUNCTIONS
    ]
    messages: list[Any] = [ASKED]
    for turn in range(3):
        asked = {"model": "tiny", "max_tokens": 200, "messages": messages, "tools": functions}
        if streams:
            with anthropic_client.messages.stream(**asked) as stream:
                found = stream.get_final_message()
        else:
            found = anthropic_client.messages.create(**asked)
        assert found.stop_reason == ("end_turn" if turn == 2 else "tool_use")
        messages.append({"role": "assistant", "content": found.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": tools.call(block.name, block.input)}
            for block in found.content if block.type == "tool_use"
        ]  # fmt: skip
        messages.append({"role": "user", "content": results})
    assert (found.content[0].text, tools.called) == (SAID, CALLED)


@pytest.mark.parametrize("streams", [False, True])
def test_anthropics_runner_of_tools(anthropic_client, tools, streams: bool) -> None:
    from anthropic import beta_tool

    runner = anthropic_client.beta.messages.tool_runner(
        model="tiny", max_tokens=200, messages=[ASKED], tools=[beta_tool(tools.weather), beta_tool(tools.add)], stream=streams
    )
    for turn in runner:
        last = turn.get_final_message() if streams else turn
    assert (last.content[0].text, tools.called) == (SAID, CALLED)
