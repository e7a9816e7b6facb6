"""Loops of two calls, to their end, by frameworks for agents; each test skips where its framework is not installed."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pydantic
import pytest

from tests.server.agents import CALLED, QUESTION, SAID, TURNS, Tools
from tests.server.small import KEY
from tests.server.tools import ADD, WEATHER, hermes_call

pytestmark = pytest.mark.filterwarnings("ignore")
ASKED = {"role": "user", "content": QUESTION}


class Answer(pydantic.BaseModel):
    """The answer to a question about the weather."""

    degrees: int
    city: str


@pytest.fixture(autouse=True)
def _forget():
    """Frameworks leave connections open; they are told while the warnings of these tests are ignored."""
    yield
    gc.collect()


@pytest.fixture
def tools(agents) -> Tools:
    agents.say(*TURNS)
    return Tools()


@pytest.fixture(scope="module")
def litellm():
    with pytest.MonkeyPatch.context() as patch:
        # else it asks the network for prices at its import
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        module = pytest.importorskip("litellm")
    module.suppress_debug_info = True
    return module


@pytest.mark.parametrize("streams", [False, True])
def test_litellms_chats(agents, tools, litellm, streams: bool) -> None:
    messages: list[Any] = [ASKED]
    for _ in range(3):
        found = litellm.completion(
            model="openai/tiny", api_base=f"{agents.url}/v1", api_key=KEY, messages=messages, tools=[WEATHER, ADD],
            stream=streams, max_tokens=200,
        )  # fmt: skip
        if streams:
            found = litellm.stream_chunk_builder(list(found), messages=messages)
        message = found.choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            said = tools.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    assert (message.content, tools.called) == (SAID, CALLED)


def test_litellms_responses(agents, tools, litellm) -> None:
    functions = [{"type": "function", **tool["function"]} for tool in (WEATHER, ADD)]
    items, before = [ASKED], None
    for _ in range(3):
        found = litellm.responses(
            model="openai/tiny", api_base=f"{agents.url}/v1", api_key=KEY, input=items, tools=functions,
            previous_response_id=before, max_output_tokens=200,
        )  # fmt: skip
        items, before = [], found.id
        for call in [item for item in found.output if item.type == "function_call"]:
            said = tools.call(call.name, json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": said})
    assert (found.output[-1].content[0].text, tools.called) == (SAID, CALLED)


def test_litellms_messages(agents, tools, litellm) -> None:
    functions = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in (WEATHER, ADD)]
    messages: list[Any] = [ASKED]

    async def run() -> Any:
        for _ in range(3):
            found = await litellm.anthropic.messages.acreate(
                model="anthropic/tiny", api_base=agents.url, api_key=KEY, messages=messages, tools=functions, max_tokens=200
            )
            messages.append({"role": "assistant", "content": found["content"]})
            calls = [block for block in found["content"] if block["type"] == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": tools.call(call["name"], call["input"])}
                for call in calls
            ]  # fmt: skip
            messages.append({"role": "user", "content": results})
        return found

    assert asyncio.run(run())["content"][0]["text"] == SAID
    assert tools.called == CALLED


def test_instructors_tools(agents) -> None:
    """Its default: a function that must be called, with the schema of the answer."""
    instructor = pytest.importorskip("instructor")
    import openai

    agents.say((QUESTION, hermes_call("Answer", degrees=10, city="Kiel")))
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key=KEY, max_retries=0, timeout=300) as client:
        found = instructor.from_openai(client).chat.completions.create(
            model="tiny", messages=[ASKED], response_model=Answer, max_tokens=200
        )
    assert (found.degrees, found.city) == (10, "Kiel")


def run_langchain(model: Any, tools: Tools) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = model.bind_tools([tools.weather, tools.add])
    messages: list[Any] = [HumanMessage(QUESTION)]
    for _ in range(3):
        message = bound.invoke(messages)
        messages.append(message)
        for call in message.tool_calls:
            messages.append(ToolMessage(tools.call(call["name"], call["args"]), tool_call_id=call["id"]))
    return message.text


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_langchains_openai(agents, tools, streams: bool, responses: bool) -> None:
    theirs = pytest.importorskip("langchain_openai")
    model = theirs.ChatOpenAI(
        model="tiny", base_url=f"{agents.url}/v1", api_key=KEY, max_retries=0, streaming=streams, max_tokens=200,
        use_responses_api=responses,
    )  # fmt: skip
    assert run_langchain(model, tools) == SAID
    assert tools.called == CALLED


@pytest.mark.parametrize("streams", [False, True])
def test_langchains_anthropic(agents, tools, streams: bool) -> None:
    theirs = pytest.importorskip("langchain_anthropic")
    model = theirs.ChatAnthropic(model="tiny", base_url=agents.url, api_key=KEY, max_retries=0, streaming=streams, max_tokens=200)
    assert run_langchain(model, tools) == SAID
    assert tools.called == CALLED


def test_langchains_agent(agents, tools) -> None:
    create_agent = pytest.importorskip("langchain.agents").create_agent
    model = pytest.importorskip("langchain_openai").ChatOpenAI(
        model="tiny", base_url=f"{agents.url}/v1", api_key=KEY, max_retries=0
    )
    found = create_agent(model, [tools.weather, tools.add]).invoke({"messages": [ASKED]})
    assert found["messages"][-1].text == SAID
    assert tools.called == CALLED


def test_llama_indexs_agent(agents, tools) -> None:
    llms = pytest.importorskip("llama_index.llms.openai_like")
    workflow = pytest.importorskip("llama_index.core.agent.workflow")

    async def run(streams: bool) -> str:
        model = llms.OpenAILike(
            model="tiny", api_base=f"{agents.url}/v1", api_key=KEY, is_chat_model=True, is_function_calling_model=True,
            max_tokens=200,
        )  # fmt: skip
        agent = workflow.FunctionAgent(tools=[tools.weather, tools.add], llm=model, streaming=streams)
        return str(await agent.run(user_msg=QUESTION))

    for streams in (False, True):
        tools.called.clear()
        assert asyncio.run(run(streams)) == SAID
        assert tools.called == CALLED


@pytest.mark.parametrize("kind", ["chat", "responses", "anthropic"])
def test_pydantic_ais_output_type(agents, tools, kind: str) -> None:
    """The answer is a call, too, of a function with the schema of the answer; one call or another must be made."""
    theirs = pytest.importorskip("pydantic_ai", exc_type=ImportError)
    agents.say(("sum=10", hermes_call("final_result", degrees=10, city="Kiel")), *TURNS[1:])
    if kind == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel as Model
        from pydantic_ai.providers.anthropic import AnthropicProvider as Provider

        provider = Provider(base_url=agents.url, api_key=KEY)
    else:
        from pydantic_ai.models import openai
        from pydantic_ai.providers.openai import OpenAIProvider

        Model = openai.OpenAIChatModel if kind == "chat" else openai.OpenAIResponsesModel
        provider = OpenAIProvider(base_url=f"{agents.url}/v1", api_key=KEY)
    agent = theirs.Agent(Model("tiny", provider=provider), output_type=Answer)
    agent.tool_plain(tools.weather)
    agent.tool_plain(tools.add)
    assert asyncio.run(agent.run(QUESTION)).output == Answer(degrees=10, city="Kiel")
    assert tools.called == CALLED
