"""/v1/messages: texts of the server's chats, scripted calls and thoughts, errors in Anthropic's form; by the official client."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from rooftile.server.http.anthropic.blocks import messages_of
from rooftile.server.http.anthropic.call import MessagesCall
from rooftile.server.http.anthropic.output import Output
from rooftile.server.observe.log import AccessRecord
from rooftile.server.refusals import Refusal
from tests.server.small import KEY
from tests.server.test_responses import SCRIPT, USAGE, chunks_of

ASKED = {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": [{"role": "user", "content": "Where is the tile?"}]}


def post(server: Any, body: dict[str, Any], path: str = "/v1/messages", **headers: str) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=headers, timeout=300)


def events_of(text: str) -> list[dict[str, Any]]:
    found = []
    for each in text.strip().split("\n\n"):
        name, data = each.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def scripted(deltas: list[dict[str, Any]], finish: str, error: Exception | None = None) -> str:
    access = AccessRecord(id="7", prompt_tokens=9)
    call = MessagesCall(access, "tiny")

    async def whole() -> bytes:
        return b"".join([each async for each in call.events(chunks_of(deltas, finish, error), access)])

    return asyncio.run(whole()).decode()


def test_a_text_is_the_chats(server) -> None:
    due = post(server, ASKED, "/v1/chat/completions").json()
    content = [{"type": "text", "text": "Where is the tile?", "cache_control": {"type": "ephemeral"}}]
    body = ASKED | {"messages": [{"role": "user", "content": content}]}
    found = post(server, body).json()
    assert found["content"] == [{"type": "text", "text": due["choices"][0]["message"]["content"]}]
    assert found["stop_reason"] == {"stop": "end_turn", "length": "max_tokens"}[due["choices"][0]["finish_reason"]]
    assert found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"] == due["usage"]["prompt_tokens"]
    assert found["usage"]["output_tokens"] == due["usage"]["completion_tokens"]
    counted = post(server, {name: body[name] for name in ("model", "messages")}, "/v1/messages/count_tokens").json()
    assert counted == {"input_tokens": due["usage"]["prompt_tokens"]}
    events = events_of(post(server, body | {"stream": True}).text)
    assert [each["type"] for each in (events[0], events[-2], events[-1])] == ["message_start", "message_delta", "message_stop"]
    assert (
        "".join(each["delta"]["text"] for each in events if each["type"] == "content_block_delta") == found["content"][0]["text"]
    )
    assert events[-2]["delta"]["stop_reason"] == found["stop_reason"]
    assert events[-2]["usage"]["output_tokens"] == found["usage"]["output_tokens"]


def test_a_budget_of_thoughts(server) -> None:
    """Clients give one to any model; a model that thinks keeps to it."""
    body = ASKED | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert post(server, body).json()["content"] == post(server, ASKED).json()["content"]
    ready = SimpleNamespace(defaults={}, max_len=99, vocabulary=99)
    for thinks, due in ((True, 1024), (False, None)):
        generation = MessagesCall(AccessRecord(), "tiny", thinks=thinks).read(body, ready)
        assert generation.params.get("thinking_token_budget") == due
    with pytest.raises(Refusal, match="thinking is -5; must be a whole number"):
        MessagesCall(AccessRecord(), "tiny", thinks=True).read(
            body | {"thinking": {"type": "enabled", "budget_tokens": -5}}, ready
        )


def test_a_stop_sequence_is_named(server) -> None:
    text = post(server, ASKED).json()["content"][0]["text"]
    found = post(server, ASKED | {"stop_sequences": [text[3:5]]}).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", text[3:5])
    assert found["content"] == [{"type": "text", "text": text[: text.index(text[3:5])]}]


def test_the_official_client(server) -> None:
    anthropic = pytest.importorskip("anthropic")
    due = post(server, ASKED).json()
    # the newest client has no temperature
    asked = {name: ASKED[name] for name in ("model", "max_tokens", "messages")} | {"extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300) as client:
        found = client.messages.create(**asked)
        assert found.content[0].text == due["content"][0]["text"]
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == found.content[0].text
            assert stream.get_final_message().usage.output_tokens == found.usage.output_tokens
        counted = client.messages.count_tokens(model="tiny", messages=ASKED["messages"]).input_tokens
        assert counted == found.usage.input_tokens + found.usage.cache_read_input_tokens
        with pytest.raises(anthropic.NotFoundError, match="the model 'other' is not served here"):
            client.messages.create(**asked | {"model": "other"})


def test_the_official_client_reads_calls_and_thoughts() -> None:
    anthropic = pytest.importorskip("anthropic")
    theirs = importlib.import_module("httpx2" if importlib.util.find_spec("httpx2") else "httpx")
    answer = theirs.Response(200, text=scripted(SCRIPT, "tool_calls"), headers={"content-type": "text/event-stream"})
    transport = theirs.MockTransport(lambda request: answer)
    client = anthropic.Anthropic(base_url="http://here", api_key="none", http_client=theirs.Client(transport=transport))
    with client, client.messages.stream(model="tiny", max_tokens=9, messages=ASKED["messages"]) as stream:
        whole = stream.get_final_message()
    assert [each.type for each in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[0].thinking == "Rome it is."
    assert (whole.content[2].name, whole.content[2].input) == ("weather", {"city": "Rome"})
    assert whole.stop_reason == "tool_use"
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens, whole.usage.output_tokens) == (5, 4, 5)


def test_calls_and_thoughts_in_a_stream() -> None:
    events = events_of(scripted(SCRIPT, "tool_calls"))
    kinds = [each["type"].removeprefix("content_block_") + str(each.get("index", "")) for each in events]
    assert kinds == [
        "message_start", "start0", "delta0", "delta0", "delta0", "stop0", "start1", "delta1", "delta1", "stop1", "start2",
        "delta2", "delta2", "stop2", "start3", "delta3", "stop3", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    whole = MessagesCall(AccessRecord(id="7"), "tiny").whole(
        {
            "usage": USAGE, "choices": [{
                "finish_reason": "tool_calls", "stop_reason": None,
                "message": {"content": "I look.", "reasoning_content": "Rome it is.", "tool_calls": [
                    {"id": "call_1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
                ]},
            }],
        }
    )  # fmt: skip
    assert [each["type"] for each in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2] == {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}
    # and back
    (message,) = messages_of([{"role": "assistant", "content": whole["content"]}], None)
    assert message["content"] == "I look."
    assert message["reasoning_content"] == "Rome it is."
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}


def test_ends_that_are_not_good() -> None:
    broken = Output()
    for _ in (*broken.take({"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"a": '}}]}), *broken.close()):
        pass
    assert broken.blocks[0]["input"] == {"incomplete": '{"a": '}
    last = events_of(scripted(SCRIPT[:4], "stop", Refusal("engine_down", "the engine has ended")))[-1]
    assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "the engine has ended"}}
    assert events_of(scripted(SCRIPT[:4], "abort"))[-1]["type"] == "error"


def test_blocks_are_messages() -> None:
    found = messages_of(
        [
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": [
                {"type": "redacted_thinking", "data": "zz"}, {"type": "text", "text": "I look.", "citations": None},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"ö": [1]}, "caller": {"type": "direct"}},
            ]},
            {"role": "user", "content": [
                {"type": "text", "text": "Now"}, {"type": "tool_result", "tool_use_id": "a", "content": "gone", "is_error": True},
                {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "1"}]},
                {"type": "tool_result", "tool_use_id": "c"},
            ]},
        ],
        "Be short.",
    )  # fmt: skip
    assert [each["role"] for each in found] == ["system", "user", "assistant", "tool", "tool", "tool", "user"]
    assert json.loads(found[2]["tool_calls"][0]["function"]["arguments"]) == {"ö": [1]}
    assert [part["text"] for part in found[3]["content"]] == ["error:", "gone"]
    assert found[5]["content"] == ""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_tokens": None}, "max_tokens is null"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"messages": []}, "messages must be a list of at least one object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0] is of type 'image'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content is missing; must be a text, or a list of blocks"),
        ({"messages": [{"role": "user", "content": "x", "name": "a"}]}, "messages[0] has 'name'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id is missing"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0] is of type 'web_search_20250305'"),
        ({"tool_choice": {"type": "required"}}, "tool_choice must be an object of type auto, any, tool"),
        ({"thinking": {"type": "on"}}, "thinking.type is 'on'"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management edits the conversation"),
        ({"stop_sequences": [""]}, "a stop is ''"),
        ({"system": "Be short."}, "no system here"),
        ({"container": "c"}, "'container' is no field"),
        ({"model": "other"}, "the model 'other' is not served here"),
    ],
)  # fmt: skip
def test_what_is_refused(server, change, sentence) -> None:
    found = post(server, ASKED | change)
    assert found.status_code in (400, 404)
    said = found.json()
    assert said["type"] == "error"
    assert said["error"]["type"] == ("not_found_error" if found.status_code == 404 else "invalid_request_error")
    assert sentence in said["error"]["message"]
    assert said["request_id"] == found.headers["x-request-id"]


def test_a_thread_is_refused_so_that_clients_send_all_messages(server) -> None:
    """The runners of tools ask for one first, and know by the code that they must go on without."""
    body = {name: ASKED[name] for name in ("model", "messages")} | {"thread": {"type": "create"}}
    for path, fields in (("/v1/messages", body | {"max_tokens": 5}), ("/v1/messages/count_tokens", body)):
        found = post(server, fields, path)
        error = found.json()["error"]
        assert (found.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert error["message"].endswith("none is kept here: send all messages")
    assert "details" not in post(server, ASKED | {"max_tokens": -1}).json()["error"]


def test_a_key_in_anthropics_header(small) -> None:
    body = ASKED | {"max_tokens": 2}
    assert post(small, body, **{"x-api-key": KEY}).status_code == 200
    found = post(small, body, **{"x-api-key": "wrong"})
    assert (found.status_code, found.json()["error"]["type"]) == (401, "authentication_error")
