"""/v1/responses by the official client: texts of the server's chats, kept answers, and scripted calls and thoughts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile.server.http.responses.call import ResponsesCall
from rooftile.server.http.responses.functions import Functions
from rooftile.server.http.responses.items import messages_of, with_instructions
from rooftile.server.http.responses.output import Output
from rooftile.server.http.responses.store import ResponseStore
from rooftile.server.observe.log import AccessRecord
from rooftile.server.refusals import Refusal

USAGE = {
    "prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}  # fmt: skip
GREEDY = {"temperature": 0, "max_output_tokens": 12}


def call_of(id: str, name: str, *arguments: str) -> list[dict[str, Any]]:
    first = {"index": 0, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
    return [{"tool_calls": [first]}, *({"tool_calls": [{"index": 0, "function": {"arguments": each}}]} for each in arguments)]


SCRIPT: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""}, {"reasoning_content": "Rome "}, {"reasoning_content": "it is."},
    {"content": "I "}, {"content": "look."}, *call_of("call_1", "weather", '{"city": ', '"Rome"}'),
    *call_of("call_2", "time", "{}"),
]  # fmt: skip


async def chunks_of(deltas: list[dict[str, Any]], finish: str, error: Exception | None = None) -> AsyncGenerator[Any, None]:
    for delta in deltas:
        yield [{"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}]}]
    if error is not None:
        raise error
    yield [
        {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish, "stop_reason": None}]},
        {"choices": [], "usage": USAGE},
    ]  # fmt: skip


def scripted(
    body: dict[str, Any], deltas: list[dict[str, Any]], finish: str = "tool_calls", store: Any = None, error: Any = None
):
    """Returns what a client with the official package reads, of a stream with these deltas."""
    access = AccessRecord(id="7", key="ann")
    call = ResponsesCall(store or ResponseStore(), access, "tiny", 1)
    call._given = {"store": True} | body

    async def whole() -> bytes:
        return b"".join([each async for each in call.events(chunks_of(deltas, finish, error), access)])

    data = asyncio.run(whole())
    answer = httpx.Response(200, content=data, headers={"content-type": "text/event-stream"})
    transport = httpx.MockTransport(lambda request: answer)
    with openai.OpenAI(api_key="none", base_url="http://here/v1", http_client=httpx.Client(transport=transport)) as client:
        return [*client.responses.create(model="tiny", input="?", stream=True)]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made


def test_a_text_is_the_chats(client) -> None:
    said = [{"role": "user", "content": "Where is the tile?"}]
    due = client.chat.completions.create(model="tiny", messages=said, temperature=0, max_tokens=12)
    found = client.responses.create(model="tiny", input="Where is the tile?", **GREEDY)
    assert found.output_text == due.choices[0].message.content
    assert found.status == {"stop": "completed", "length": "incomplete"}[due.choices[0].finish_reason]
    assert found.usage.input_tokens == due.usage.prompt_tokens
    assert found.usage.output_tokens == due.usage.completion_tokens
    assert (found.instructions, found.max_output_tokens, found.tools) == (None, 12, [])
    with client.responses.stream(model="tiny", input="Where is the tile?", **GREEDY) as stream:
        events = [each.type for each in stream]
        whole = stream.get_final_response() if found.status == "completed" else None
    assert events[:2] == ["response.created", "response.in_progress"]
    assert events[-1] == f"response.{found.status}"
    assert whole is None or whole.output_text == found.output_text


def test_a_schema_and_logprobs(client) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": True}}
    found = client.responses.create(model="tiny", input="A number?", text=form, top_logprobs=2, max_output_tokens=400)
    if found.status == "completed":
        assert isinstance(json.loads(found.output_text)["n"], int)
    scores = found.output[0].content[0].logprobs
    assert "".join(each.token for each in scores) == found.output_text
    assert {len(each.top_logprobs) for each in scores} <= {2, 3}


def test_a_conversation_goes_on_from_a_kept_response(client) -> None:
    first = client.responses.create(model="tiny", input="Where is the tile?", **GREEDY)
    second = client.responses.create(model="tiny", input="And the roof?", previous_response_id=first.id, **GREEDY)
    said = [
        {"role": "user", "content": "Where is the tile?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And the roof?"},
    ]
    due = client.chat.completions.create(model="tiny", messages=said, temperature=0, max_tokens=12)
    assert second.output_text == due.choices[0].message.content
    assert second.usage.input_tokens == due.usage.prompt_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=r"no response 'resp_.*' is kept; the newest 64 MiB of responses are"):
        client.responses.create(model="tiny", input="And?", previous_response_id=first.id)
    kept = client.responses.create(model="tiny", input="Where?", store=False, **GREEDY)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"input": []}, "input must be a text, or a list of at least one item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0] is of type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "a part of type 'input_image'"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id is missing"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output is missing"),
        ({"input": [{"role": "user"}]}, "input[0].content is missing"),
        ({"input": [{"type": "reasoning", "summary": 5}]}, "input[0] has content or a summary of type int; must be a list"),
        ({"input": "x", "max_output_tokens": -1}, "max_output_tokens is -1"),
        ({"input": "x", "top_p": 3}, "top_p is 3"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0] is of type 'web_search'"),
        ({"input": "x", "tools": "all"}, "tools must be a list"),
        ({"input": "x", "tools": [{"type": "namespace", "tools": []}]}, "tools[0].name is missing"),
        ({"input": "x", "tools": [{"type": "namespace", "name": "a", "tools": 5}]}, "tools[0].tools must be a list"),
        (
            {"input": "x", "tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}]},
            "tools[0].tools[0] is of type 'custom'",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}", "namespace": 5}]}, "input[0].namespace is no text"),
        ({"input": "x", "tool_choice": {"type": "custom"}}, "tool_choice must be none, auto, required"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include must be a list of some of"),
        ({"input": "x", "background": True}, "background is true; must be false"),
        ({"input": "x", "conversation": "c"}, "'conversation' is no field"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.json_schema has no schema"),
        ({"input": "x", "instructions": "Be short."}, "no system here"),
        ({"input": "x", "n": 2}, "'n' is no field"),
        ({"input": "x", "model": 7}, "model is 7; must be a text"),
    ],
)  # fmt: skip
def test_what_is_refused(server, body, sentence) -> None:
    found = httpx.post(f"{server.url}/v1/responses", json=body, timeout=300)
    assert found.status_code == 400
    assert sentence in found.json()["error"]["message"]


def test_calls_and_thoughts_in_a_stream() -> None:
    store = ResponseStore()
    events = scripted({}, SCRIPT, store=store)
    assert [each.sequence_number for each in events] == [*range(len(events))]
    kinds = [each.type.removeprefix("response.") for each in events]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done", "output_item.added", "content_part.added",
        "output_text.delta", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    response = events[-1].response
    assert [each.type for each in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output[0].content[0].text == "Rome it is."
    assert response.output_text == "I look."
    assert [(each.call_id, each.name, each.arguments) for each in response.output[2:]] == [
        ("call_1", "weather", '{"city": "Rome"}'), ("call_2", "time", "{}"),
    ]  # fmt: skip
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    assert response.usage.input_tokens_details.cached_tokens == 4
    # what began empty was not shown filled: an event is written when it happens
    added = [each.item for each in events if each.type == "response.output_item.added"]
    assert [getattr(each, "arguments", "") for each in added] == [""] * 4
    # the items come back as the client has got them, and are what the model's message was
    items = [each.model_dump(exclude_none=True) for each in response.output]
    assert messages_of(items) == store.find("ann", response.id).messages[-1:]


def test_functions_in_namespaces() -> None:
    """Codex and others group functions; a model sees one list of names, and a client gets its own back."""
    spawn = {"type": "function", "name": "spawn", "description": "Begins.", "strict": False, "parameters": {"type": "object"}}
    functions = Functions([
        spawn | {"name": "run"}, {"type": "namespace", "name": "agents", "description": "Others.", "tools": [spawn]},
        {"type": "namespace", "name": "mcp__files__", "tools": [spawn]},
    ])  # fmt: skip
    names = [tool["function"]["name"] for tool in functions.tools]
    assert names == ["run", "agents__spawn", "mcp__files__spawn"]
    assert functions.tools[1]["function"]["parameters"] == {"type": "object"}
    output = Output("1")
    output.functions = functions
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in names]
    for _ in (*output.take({"tool_calls": calls}), *output.close()):
        pass
    assert [(item["name"], item.get("namespace")) for item in output.items] == [
        ("run", None), ("spawn", "agents"), ("spawn", "mcp__files__"),
    ]  # fmt: skip
    for found in (output.message(), *messages_of(output.items)):
        assert [call["function"]["name"] for call in found["tool_calls"]] == names


def test_ends_that_are_not_good() -> None:
    cut = scripted({}, SCRIPT[:8], "length")[-1]
    assert cut.type == "response.incomplete"
    assert cut.response.incomplete_details.reason == "max_output_tokens"
    assert [each.status for each in cut.response.output] == ["completed", "completed", "incomplete"]
    assert scripted({}, SCRIPT[:3], "abort")[-1].type == "response.failed"
    ended = scripted({}, SCRIPT[:4], error=Refusal("engine_down", "the engine has ended"))[-1]
    assert (ended.type, ended.response.error.message) == ("response.failed", "the engine has ended")


def test_items_are_messages() -> None:
    found = messages_of(
        [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
            {"role": "user", "content": "Rome?"},
            {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "zz"},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Sun", "annotations": []}]},
            {"role": "assistant", "content": "ny."},
        ]
    )
    assert [each["role"] for each in found] == ["system", "user", "assistant", "tool", "tool", "assistant", "assistant"]
    assert [each["id"] for each in found[2]["tool_calls"]] == ["a", "b"]
    (first, *rest) = with_instructions("Be short.", found)
    assert first == {"role": "system", "content": ["Be short.", {"type": "input_text", "text": "Be kind."}]}
    assert rest == found[1:]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=40), st.data())
def test_any_cut_gives_the_same_items(cuts: list[int], data: Any) -> None:
    """And the whole message, too."""
    text, arguments = "I look for roofs.", '{"city": "Rome"}'

    def pieces(whole: str) -> list[str]:
        found = []
        while whole:
            size = data.draw(st.integers(1, 6))
            found.append(whole[:size])
            whole = whole[size:]
        return found

    parts = [{"content": each} for each in pieces(text)] + call_of("a", "weather", *pieces(arguments))
    one, other = Output("1"), Output("1")
    for delta in parts:
        for _ in one.take(delta):
            pass
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    for _ in other.take({"content": text, "tool_calls": [call]}):
        pass
    for each in (one, other):
        for _ in each.close():
            pass
    assert one.items == other.items
    assert one.message() == other.message()


def test_the_store_is_bounded_and_each_keys_own() -> None:
    store = ResponseStore(1000)
    for n in range(100):
        store.keep("ann", {"id": f"r{n}", "text": "x" * 100}, [])
        assert store.bytes <= 1000
    assert store.find("ann", "r99").response["id"] == "r99"
    for key, id in (("ann", "r0"), ("bob", "r99")):
        with pytest.raises(Refusal, match="is kept"):
            store.find(key, id)
    store.keep("ann", {"id": "large", "text": "x" * 2000}, [])
    assert store.find("ann", "r99")
    while store.bytes:
        store.remove("ann", next(iter(store._kept)))
    assert not store._kept
