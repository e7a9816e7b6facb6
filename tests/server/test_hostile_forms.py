"""Odd bodies for responses, messages, embeddings and adapters: an answer or one clear sentence, and nothing is lost."""

from __future__ import annotations

import copy
import json
import re
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooftile.server.engine.messages import Ready
from rooftile.server.http.anthropic.call import MessagesCall, count_request
from rooftile.server.http.embedding.forms import EmbeddingForm, RerankForm, ScoreForm
from rooftile.server.http.embedding.input import list_documents, list_inputs, list_texts
from rooftile.server.http.openai.fields import read_form
from rooftile.server.http.responses.call import ResponsesCall
from rooftile.server.http.responses.store import ResponseStore
from rooftile.server.observe.log import AccessRecord
from rooftile.server.refusals import Refusal
from tests.server.agents import QUESTION, TURNS
from tests.server.test_hostile import ODD, VALUES
from tests.server.tools import ADD, WEATHER

READY = Ready("", None, 999, 999, 9, 9, 16, {})
SCHEMA = WEATHER["function"]["parameters"]
RESPONSE: dict[str, Any] = {
    "model": "tiny", "max_output_tokens": 3, "instructions": "Be kind.", "temperature": 0.5, "stream": False, "store": True,
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]}, {"role": "user", "content": "Rome?"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "spawn", "namespace": "agents", "arguments": "{}", "id": "f"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "9"}]},
    ],
    "tools": [
        {"type": "function", **WEATHER["function"]},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "parameters": SCHEMA}]},
    ],
    "tool_choice": "auto", "text": {"format": {"type": "text"}, "verbosity": "medium"}, "metadata": {"a": "b"},
    "reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
}  # fmt: skip
COUNT: dict[str, Any] = {
    "model": "tiny", "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Rome?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Rome"}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "9", "is_error": False}]},
    ],
    "tools": [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 5}, "output_config": {"effort": "low"},
}  # fmt: skip
MESSAGE = COUNT | {"max_tokens": 3, "stop_sequences": ["zz"], "temperature": 0.5, "top_k": 5, "metadata": {"user_id": "a"}}
EMBED: dict[str, Any] = {"input": ["a", "b"], "dimensions": 3, "encoding_format": "float", "truncate_prompt_tokens": 5}
RANK: dict[str, Any] = {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}
SCORE: dict[str, Any] = {"text_1": "a", "text_2": ["b", "c"], "truncate_prompt_tokens": 5}
EMBEDDING = {"/v1/embeddings": EMBED, "/v1/rerank": RANK, "/score": SCORE}
BODIES = {"/v1/responses": RESPONSE, "/v1/messages": MESSAGE, "/v1/messages/count_tokens": COUNT}


def places_in(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values in a body."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in pairs for place in ((*before, key), *places_in(inner, (*before, key)))]


def at(value: Any, place: Any) -> Any:
    """Returns the value at a place."""
    for key in place:
        value = value[key]
    return value


@st.composite
def bodies(draw: Any, body: dict[str, Any]) -> dict[str, Any]:
    """A body with some odd values, some values less, and some more."""
    made = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(places_in(made) or [("model",)]))
        inner = at(made, way)
        kind = draw(st.sampled_from(["odd", "odd", "gone", "moved", "more"]))
        if kind == "gone" and isinstance(inner, dict):
            del inner[last]
        elif kind == "more" and isinstance(inner, dict):
            inner[draw(st.text(max_size=6))] = draw(VALUES)
        elif kind == "more" and isinstance(inner, list):
            inner += copy.deepcopy(inner[last : last + 1]) * draw(st.sampled_from([1, 1200]))
        elif kind == "moved":
            inner[last] = copy.deepcopy(at(body, draw(st.sampled_from(places_in(body)))))
        else:
            inner[last] = copy.deepcopy(draw(st.sampled_from(ODD) | VALUES))
    return made


def assert_one_sentence(message: str) -> None:
    """It says something, in one line, and in a client's words."""
    assert 10 < len(message) < 1000, message[:300]
    assert message.isprintable()
    assert not re.search(r"Traceback|object has no|object is not|NoneType|KeyError|<class|unhashable|pydantic", message), message


def read_response(body: dict[str, Any]) -> None:
    ResponsesCall(ResponseStore(), AccessRecord(id="1"), "tiny", 1).read(body, READY)


def read_message(body: dict[str, Any]) -> None:
    MessagesCall(AccessRecord(id="1"), "tiny", thinks=True).read(body, READY)


def read_embedding(body: dict[str, Any]) -> None:
    list_inputs(read_form(EmbeddingForm, body).input)


def read_ranking(body: dict[str, Any]) -> None:
    list_documents(read_form(RerankForm, body).documents)


def read_score(body: dict[str, Any]) -> None:
    form = read_form(ScoreForm, body)
    list_texts("text_1", form.text_1), list_texts("text_2", form.text_2)


READERS = [
    (read_response, RESPONSE), (read_message, MESSAGE), (lambda body: count_request(body, READY), COUNT), (read_embedding, EMBED),
    (read_ranking, RANK), (read_score, SCORE),
]  # fmt: skip


def refused_by(read: Any, body: dict[str, Any]) -> str | None:
    """The sentence that refuses a body; None if it is read."""
    try:
        read(body)
    except Refusal as refusal:
        return refusal.message if refusal.status in (400, 404) else f"status {refusal.status}"
    return None


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("read", "body"), READERS, ids=[*BODIES, *EMBEDDING])
def test_any_body_is_read_or_refused_in_a_sentence(read, body, count) -> None:
    read(copy.deepcopy(body))

    @settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(bodies(body))
    def check(made: dict[str, Any]) -> None:
        # what a body may hold has come as JSON
        made = json.loads(json.dumps(made))
        message = refused_by(read, made)
        if message is not None:
            assert_one_sentence(message)

    check()


@pytest.mark.parametrize("path", BODIES)
def test_any_body_is_answered_or_refused(agents, path) -> None:
    agents.say()

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(bodies(BODIES[path]))
    def check(made: dict[str, Any]) -> None:
        answer = agents.post(path, made)
        assert answer.status_code in (200, 400, 404), (made, answer.text)
        if answer.status_code != 200 and answer.headers["content-type"] == "application/json":
            assert_one_sentence(answer.json()["error"]["message"])

    check()
    agents.wait_until_idle()


DEEP: Any = {"type": "object"}
for _ in range(70):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
LONG = "x" * 2**20


def function(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}} | more


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}} | more


@pytest.mark.parametrize(
    ("path", "change", "sentence"),
    [
        ("/v1/responses", {"tools": [function(parameters=DEEP)]}, "is nested deeper than 64 levels"),
        ("/v1/messages", {"tools": [tool(input_schema=DEEP)]}, "is nested deeper than 64 levels"),
        ("/v1/responses", {"tools": [function()] * 10_000}, "tools has 10,000 functions; may have at most 128"),
        ("/v1/messages", {"tools": [tool()] * 10_000}, "tools has 10,000 functions; may have at most 128"),
        ("/v1/messages/count_tokens", {"tools": [tool()] * 10_000}, "tools has 10,000 functions; may have at most 128"),
        (
            "/v1/responses", {"tools": [{"type": "namespace", "name": "n", "tools": [function()] * 10_000}]},
            "tools has 10,000 functions",
        ),
        ("/v1/responses", {"tools": [function("a\nb")]}, "name is 'a\\nb'; must be 1 to 64 letters"),
        ("/v1/messages", {"tools": [tool("a\nb")]}, "name is 'a\\nb'; must be 1 to 64 letters"),
        ("/v1/responses", {"tools": [{"type": "namespace", "name": "a\nb", "tools": [function()]}]}, "must be 1 to 64 letters"),
        ("/v1/responses", {"tools": [function(description=LONG)]}, "tools has 1,"),
        ("/v1/messages", {"tools": [tool(description=LONG)]}, "tools has 1,"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "cache_salt": LONG}, "cache_salt is 'xxx"),
        ("/v1/responses", {"previous_response_id": LONG}, "previous_response_id is 'xxx"),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 2000}, "input has 2,000 items; may have at most 1,024"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}] * 2000}, "messages has 2,000 messages; may have at"),
        ("/v1/responses", {"input": LONG + "x"}, "may have at most 1048576 bytes"),
        ("/v1/messages", {"system": LONG + "x"}, "may have at most 1048576 bytes"),
        ("/v1/messages", {"stop_sequences": [[[]] * 900]}, "a stop is [[], [], "),
        ("/v1/responses", {"model": "no\nmodel"}, "the model 'no\\nmodel' is not served here"),
        ("/v1/load_lora_adapter", {"lora_name": LONG, "lora_path": "b"}, "lora_name is 'xxx"),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": LONG}, "lora_path is 'xxx"),
        ("/v1/load_lora_adapter", {"lora_name": ["x"], "lora_path": "b"}, "lora_name is ['x']; must be a text"),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": {}}, "lora_path is {}; must be a text"),
        ("/v1/unload_lora_adapter", {"lora_name": 7}, "lora_name is 7; must be a text"),
        ("/v1/unload_lora_adapter", {"lora_name": "x\ny"}, "there is no adapter 'x\\ny'"),
    ],
)  # fmt: skip
def test_too_much_is_refused_in_a_sentence(agents, path, change, sentence) -> None:
    due: dict[str, Any] = {
        "/v1/responses": {"input": "a", "max_output_tokens": 2},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    }.get(path, {})
    answer = agents.post(path, due | change)
    assert answer.status_code in (400, 404), answer.text[:500]
    message = answer.json()["error"]["message"]
    assert sentence in message
    assert_one_sentence(message)
    assert len(message) < 400


def test_a_thought_without_an_end(agents) -> None:
    """It ends where the tokens do, and is told as cut off in each form; nobody waits for content."""
    agents.say(("think", "<think>\n" + "and then " * 400))
    response = agents.post("/v1/responses", input="think", max_output_tokens=60).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 50
    asked = {"messages": [{"role": "user", "content": "think"}], "max_tokens": 60}
    message = agents.post("/v1/messages", **asked).json()
    assert message["stop_reason"] == "max_tokens"
    assert [block["type"] for block in message["content"]] == ["thinking"]
    # a budget ends the thought, and the answer goes on
    message = agents.post("/v1/messages", **asked, thinking={"type": "enabled", "budget_tokens": 20}).json()
    assert message["content"][0]["type"] == "thinking"
    assert len(message["content"][0]["thinking"]) < 200
    agents.wait_until_idle()


def test_an_adapter_is_unloaded_while_its_requests_run(agents) -> None:
    """They end with it, whole and streamed; later ones are refused, and its slot is free again."""
    agents.say()
    assert agents.post("/v1/load_lora_adapter", lora_name="b", lora_path="b").status_code == 200
    asked = {"model": "b", "prompt": "The roof", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    due = agents.complete(**asked)["choices"][0]["text"]
    found: list[Any] = []

    def run(stream: bool) -> None:
        if stream:
            found.append("".join(event["choices"][0]["text"] for event in agents.events(**asked)))
        else:
            found.append(agents.complete(**asked)["choices"][0]["text"])

    threads = [threading.Thread(target=run, args=(n % 2 == 0,)) for n in range(6)]
    for thread in threads:
        thread.start()
    while agents.metric("num_requests_running") < 6:
        assert any(thread.is_alive() for thread in threads)
    assert agents.post("/v1/unload_lora_adapter", lora_name="b").status_code == 200
    assert agents.post("/v1/completions", asked).status_code == 404
    for thread in threads:
        thread.join(60)
    assert found == [due] * 6
    # as often as one likes: two slots, and the other one is taken
    for _ in range(3):
        assert agents.post("/v1/load_lora_adapter", lora_name="b", lora_path="b").status_code == 200
        assert agents.post("/v1/unload_lora_adapter", lora_name="b").status_code == 200
    agents.wait_until_idle()


def test_odd_requests_leave_a_loop_of_calls_as_it_was(agents) -> None:
    agents.say(*TURNS)
    body = {"input": QUESTION, "tools": [function(**WEATHER["function"]), function(**ADD["function"])]}
    (call,) = agents.post("/v1/responses", body).json()["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Kiel"})
