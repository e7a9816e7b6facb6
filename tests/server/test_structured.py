"""Structured output: what comes out follows the grammar, and a bad grammar hurts only who sent it."""

from __future__ import annotations

import asyncio
import json
import re
import time

import openai
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rooftile import InvalidInput
from rooftile.engine import SamplingParams
from tests.server.living import PATIENCE_S, living
from tests.server.schemas import SCHEMAS, follows

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "tiles": {"type": "integer", "maximum": 99}},
    "required": ["name", "tiles"], "additionalProperties": False,
}  # fmt: skip
DEEP: dict = {"type": "string"}
for _ in range(20):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


def nested(levels: int) -> dict:
    found: dict = {}
    for _ in range(levels - 1):
        found = {"not": found}
    return found


TOGETHER = 50


def schemas_of(count: int):
    """Gives a test `count` schemas and seeds; it runs 50 of them together, which takes a tenth of the time."""
    bounds = settings(
        max_examples=count // TOGETHER, phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    lists = st.lists(SCHEMAS, min_size=TOGETHER, max_size=TOGETHER)
    return lambda test: bounds(given(lists, st.integers(0, 99))(test))


@schemas_of(100)
def test_what_comes_out_is_of_the_schema(llm, schemas, seed) -> None:
    assert_follows(llm, schemas, seed)


@pytest.mark.sweep
@schemas_of(500)
def test_what_comes_out_is_of_each_schema(llm, schemas, seed) -> None:
    assert_follows(llm, schemas, seed)


def assert_follows(llm, schemas, seed) -> None:
    asked = [SamplingParams(structured={"json": each}, temperature=2.0, seed=seed, max_tokens=400) for each in schemas]
    complete = 0
    for output, schema in zip(llm.generate([[5, 6, 7]] * len(asked), asked), schemas, strict=True):
        assert output.error is None, schema
        answer = output.outputs[0]
        if answer.finish_reason == "stop":
            complete += 1
            assert follows(json.loads(answer.text), schema), answer.text
        else:
            assert len(answer.token_ids) == 400, "an answer ends where its grammar does"
    assert complete > 0


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[ab]{3}c+!"}, "[ab]{3}c+!"),
        ({"choice": ["yes", "no", "né – 😀"]}, "yes|no|né – 😀"),
        ({"json": {"const": "a"}}, '"a"'),
    ],
)
def test_each_kind(llm, structured, pattern) -> None:
    params = SamplingParams(structured=structured, temperature=2.0, n=4, seed=1, max_tokens=200)
    (output,) = llm.generate("The roof", params)
    for answer in output.outputs:
        assert answer.finish_reason == "stop"
        assert re.fullmatch(pattern, answer.text)


def test_neighbours_without_a_grammar_are_untouched(llm) -> None:
    free = SamplingParams(temperature=0, max_tokens=20)
    (alone,) = llm.generate("The roof", free)
    tied = SamplingParams(structured={"regex": "[ab]*"}, max_tokens=20, seed=1)
    together, constrained = llm.generate(["The roof", "The roof"], [free, tied])
    assert together.outputs[0].token_ids == alone.outputs[0].token_ids
    assert set(constrained.outputs[0].text) <= {"a", "b"}


def test_a_grammar_survives_preemption(folder) -> None:
    from rooftile.engine import LLM

    tight = LLM(folder, device="cpu", num_blocks=10, max_model_len=128)
    params = SamplingParams(structured={"regex": "[ab]{60}"}, seed=3, max_tokens=100)
    found = tight.generate(["The roof"] * 4, params)
    assert tight.engine.scheduler.preemptions > 0
    assert all(re.fullmatch("[ab]{60}", output.outputs[0].text) for output in found)


def test_over_http_as_the_client_writes_it(server, llm) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "roof", "schema": SCHEMA, "strict": True}}
    messages = [{"role": "user", "content": "Which roof?"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "tiny", "messages": messages, "seed": 4, "max_tokens": 300, "response_format": wrapped}
        found = client.chat.completions.create(**asked).choices[0]
        (due,) = llm.chat(messages, SamplingParams(structured={"json": SCHEMA}, seed=4, max_tokens=300))
        assert found.message.content == due.outputs[0].text
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True))
    assert streamed == found.message.content
    if found.finish_reason == "stop":
        assert follows(json.loads(found.message.content), SCHEMA)
    choice = server.complete(structured_outputs={"choice": ["red", "blue"]}, seed=1)["choices"][0]
    assert choice["text"] in ("red", "blue")
    assert choice["finish_reason"] == "stop"
    anything = server.post(CHAT, messages=messages, response_format={"type": "json_object"}, seed=2, max_tokens=60).json()
    assert anything["choices"][0]["message"]["content"].startswith("{")
    plain = server.post(CHAT, messages=messages, response_format={"type": "text"}, seed=2, max_tokens=5)
    assert plain.status_code == 200


def test_another_kind_of_grammar_is_refused_by_name(server) -> None:
    answer = server.post("/v1/completions", prompt="a", structured_outputs={"lark": "start: x"}, max_tokens=5)
    assert answer.status_code == 400
    assert (
        answer.json()["error"]["message"]
        == "'lark' is no field of structured_outputs; has json, regex, choice, grammar, structural_tag, json_object"
    )


@pytest.mark.parametrize(
    ("grammar", "code"),
    [
        ({"json": {"$ref": "#"}}, "invalid_grammar"),
        ({"json": {"type": "bogus"}}, "invalid_grammar"),
        ({"json": {"type": 5}}, "invalid_grammar"),
        ({"json": {"$ref": "https://example.org/schema"}}, "invalid_grammar"),
        ({"json": {"$ref": "#/nowhere"}}, "invalid_grammar"),
        ({"json": {"enum": []}}, "invalid_grammar"),
        ({"json": {"type": "string", "pattern": "((("}}, "invalid_grammar"),
        ({"json": DEEP}, "invalid_grammar"),
        ({"json": nested(33)}, "invalid_grammar"),
        ({"json": {"description": "x" * 65536}}, "invalid_grammar"),
        ({"regex": "(("}, "invalid_grammar"),
        ({"regex": "a" * 4097}, "invalid_value"),
        ({"choice": []}, "invalid_value"),
        ({"choice": [""]}, "invalid_value"),
        ({"choice": ["a"] * 1025}, "invalid_value"),
        ({"choice": ["a"], "regex": "b"}, "invalid_value"),
        ({}, "invalid_value"),
        ({"json": 5}, "invalid_value"),
        ({"json": "{"}, "invalid_grammar"),
        ({"json": "5"}, "invalid_value"),
        ({"json": '"' * 70_000}, "invalid_grammar"),
        ({"json": "[" * 50_000}, "invalid_grammar"),
        ({"json": '{"a":"\\ud800"}'}, "invalid_grammar"),
        ({"grammar": ""}, "invalid_grammar"),
        ({"grammar": "root ::= ("}, "invalid_grammar"),
        ({"grammar": "start: missing"}, "invalid_grammar"),
        ({"grammar": "start: " + "(" * 9000}, "invalid_grammar"),
        ({"grammar": "a" * 20_000}, "invalid_value"),
        ({"grammar": "start: " + 'a: "b"\n' * 600}, "invalid_grammar"),
        ({"grammar": "root ::= " + "(" * 9000}, "invalid_grammar"),
        ({"structural_tag": {}}, "invalid_value"),
        ({"structural_tag": "["}, "invalid_grammar"),
        ({"structural_tag": {"structures": [], "triggers": ["a"]}}, "invalid_value"),
        ({"structural_tag": {"structures": [{"begin": "b", "schema": {}, "end": ""}], "triggers": ["a"]}}, "invalid_value"),
        ({"structural_tag": {"structures": [{"begin": "a", "schema": 5, "end": ""}], "triggers": ["a"]}}, "invalid_value"),
        (
            {"structural_tag": {"structures": [{"begin": "a", "schema": DEEP | {"type": "x"}, "end": ""}], "triggers": ["a"]}},
            "invalid_grammar",
        ),
        ({"structural_tag": {"format": {"type": "any_text"}}}, "invalid_value"),
        ({"structural_tag": {"structures": [], "triggers": [], "more": 1}}, "invalid_value"),
        ({"json_object": False}, "invalid_value"),
        ({"json_object": True, "regex": "a"}, "invalid_value"),
    ],
    ids=range(40),
)
def test_a_bad_grammar_is_refused(server, grammar, code) -> None:
    answer = server.post("/v1/completions", prompt="a", structured_outputs=grammar, max_tokens=5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), answer.text
    assert answer.json()["error"]["param"] == "structured_outputs"
    # llguidance shows where it has stopped in a grammar of its own, which nobody has sent
    assert "start:" not in answer.text
    assert " at 1(" not in answer.text
    assert server.complete(max_tokens=1)["choices"]


@pytest.mark.parametrize(
    "grammar",
    [
        {}, {"type": "number", "maximum": 2e10}, True, {"type": ["string", "null"]}, {"const": 10**25}, {"maximum": 2**64},
        nested(4),
    ],
)  # fmt: skip
def test_odd_grammars_are_answered_or_refused(server, grammar) -> None:
    answer = server.post("/v1/completions", prompt="a", structured_outputs={"json": grammar}, max_tokens=20)
    assert answer.status_code in (200, 400)
    assert server.complete(max_tokens=1)["choices"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}, {},
        {"type": "json_schema", "json_schema": {"schema": {}, "more": 1}}, {"type": "json_object", "schema": {}},
    ],
)  # fmt: skip
def test_a_wrong_format_is_refused(server, wrong) -> None:
    answer = server.post(CHAT, messages=[{"role": "user", "content": "a"}], response_format=wrong)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize("fields", [{"min_tokens": 2}, {"ignore_eos": True}, {"bad_words": ["a"]}, {"allowed_token_ids": [5]}])
def test_what_contradicts_a_grammar_is_refused(fields) -> None:
    with pytest.raises(InvalidInput, match="is given with structured"):
        SamplingParams(structured={"json": {}}, **fields)
    with pytest.raises(InvalidInput, match="with beam_width"):
        SamplingParams(structured={"json": {}}, beam_width=2)


@pytest.mark.parametrize(
    "wrong", [{}, {"json": {}, "regex": "a"}, {"xml": 1}, "json", {"json": 5}, {"regex": 5}, {"choice": "ab"}]
)
def test_the_parameter_is_checked(wrong) -> None:
    with pytest.raises(InvalidInput, match="structured"):
        SamplingParams(structured=wrong)


def test_a_stream_goes_on_while_a_hostile_grammar_is_compiled(folder) -> None:
    """Many properties with patterns take seconds to compile; pieces of another stream come all the while."""
    hostile = {
        "type": "object",
        "properties": {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{1,{n % 50 + 1}}}x$"} for n in range(600)},
    }

    async def test() -> None:
        async with living(folder) as it:
            begun = asyncio.Event()
            other = asyncio.create_task(it.stream(begun, max_tokens=8000))
            await begun.wait()
            counted = it.engine.stats.steps
            began = time.monotonic()
            answer = await it.client.post(
                "/v1/completions", json={"prompt": "a", "structured_outputs": {"json": hostile}, "max_tokens": 2}
            )
            took, steps = time.monotonic() - began, it.engine.stats.steps - counted
            assert answer.status_code in (200, 400)
            # steps of this model take milliseconds: one in 200 ms is far from a standstill, and near to it on no machine
            assert steps >= took / 0.2
            assert not other.done()
            other.cancel()

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


@pytest.mark.parametrize("first", ["ab", "ba"])
def test_properties_come_in_the_order_of_their_own_schema(llm, first) -> None:
    """Also where a schema with the same properties in another order was compiled before."""
    for order in (first, first[::-1]):
        properties = {name: {"type": "boolean"} for name in order}
        schema = {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}
        (output,) = llm.generate("a", SamplingParams(structured={"json": schema}, seed=3, max_tokens=1000))
        assert list(json.loads(output.outputs[0].text)) == list(order)


CHAIN = {"$defs": {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(1500)} | {"1500": {}}, "$ref": "#/$defs/0"}


@pytest.mark.parametrize(
    "grammar",
    [
        {"json": CHAIN}, {"json": json.dumps(CHAIN)},
        {"grammar": "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(500)) + 'r500: "a"'},
        {"grammar": "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1} a{n + 1}\n" for n in range(400)) + 'a400 ::= "a"?'},
        {"grammar": "start: T0\n" + "".join(f"T{n}: T{n + 1} T{n + 1}\n" for n in range(60)) + 'T60: "a"'},
        {"grammar": 'start: ("a"{1,1000} "b"{1,1000}){1,1000}'},
    ],
    ids=range(6),
)  # fmt: skip
def test_what_refers_far_ends_no_engine(server, grammar) -> None:
    """The compiler follows references by recursion: an overflow of its stack would be the end of the engine's process."""
    answer = server.post("/v1/completions", prompt="a", structured_outputs=grammar, max_tokens=2)
    assert answer.status_code == 200 or answer.json()["error"]["code"] == "invalid_grammar"
    assert server.complete(max_tokens=1)["choices"]


TAGS = {
    "structures": [
        {"begin": "<f=a>", "schema": {"const": 1}, "end": "</f>"}, {"begin": "<f=b>", "schema": {"const": "x"}, "end": "!"},
    ],
    "triggers": ["<f="],
}  # fmt: skip
FORMAT = {
    "type": "triggered_tags", "triggers": ["<f="],
    "tags": [
        {"type": "tag", "begin": each["begin"], "content": {"type": "json_schema", "json_schema": each["schema"]},
         "end": each["end"]}
        for each in TAGS["structures"]
    ],
}  # fmt: skip


def test_every_way_to_ask_for_a_grammar(server, llm) -> None:
    object_ = {"type": "json_object"}
    for fields, pattern in (
        ({"structured_outputs": {"grammar": 'root ::= "a" b{2} | "c"\nb ::= [0-9]'}}, "a[0-9]{2}|c"),
        ({"structured_outputs": {"grammar": 'start: /[ab]{3}/ "!"'}}, "[ab]{3}!"),
        ({"structured_outputs": {"json": '{"const": "a"}'}}, '"a"'), ({"guided_json": {"const": "a"}}, '"a"'),
        ({"guided_json": '{"const": "a"}'}, '"a"'), ({"guided_regex": "[ab]{4}"}, "[ab]{4}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"), ({"guided_grammar": 'root ::= "yes"'}, "yes"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*"), ({"response_format": object_}, r"\{.*"),
        ({"structured_outputs": {"structural_tag": TAGS}}, ".*"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, ".*"),
        ({"response_format": {"type": "structural_tag"} | TAGS}, ".*"),
        ({"response_format": {"type": "structural_tag", "format": FORMAT}}, ".*"),
    ):  # fmt: skip
        answer = server.post("/v1/completions", prompt="a", seed=3, max_tokens=40, **fields)
        assert answer.status_code == 200, answer.text
        assert re.fullmatch(pattern, answer.json()["choices"][0]["text"], re.DOTALL), fields
    both = server.post("/v1/completions", prompt="a", guided_regex="a", response_format=object_).json()["error"]
    assert both["message"] == "response_format and guided_regex are both given; give one of them"


def test_many_grammars_leave_memory_flat(llm) -> None:
    import psutil

    compiled, process, before = llm.engine.grammars, psutil.Process(), 0
    for n in range(1500):
        compiled.compile({"choice": [f"text {n}", "another " * (n % 7 + 1)]})
        before = process.memory_info().rss if n == 300 else before
    assert len(compiled._kept) <= 64
    assert process.memory_info().rss - before < 64 * 2**20
