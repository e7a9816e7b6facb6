"""Thoughts on the wire: apart from content, whole and streamed, with whatever else a request asks for; counted by tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rooftile.engine import LLM, SamplingParams
from rooftile.engine.chat.parts import PlainReader, read_whole
from rooftile.engine.chat.thinking import ThoughtReader
from rooftile.engine.chat.thought_formats import choose_format
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput
from rooftile.server.http.openai.conversation import read_messages
from tests.server.asking import CHATS, refused
from tests.server.scripted import ScriptedServer
from tests.server.thinking import TEMPLATE, thinking_server

THOUGHT, CONTENT = "The roof? It's a tile.\n\nDon't stop yet", "Because 12 < 34.\n"
SAID = f"<think>\n{THOUGHT}\n</think>\n\n{CONTENT}"
OPENED = {"chat_template_kwargs": {"opened": True}}
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def thinking(folder, tmp_path_factory) -> Iterator[ScriptedServer]:
    with thinking_server(folder, tmp_path_factory.mktemp("script")) as made:
        made.say(
            ("both", SAID), ("opened", SAID.removeprefix("<think>\n")), ("cut", "<think>\nnever ends"), ("off", CONTENT),
            ("plain", CONTENT),
        )  # fmt: skip
        yield made


def asked(what: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": what}], "temperature": 0} | fields


def streamed(server: ScriptedServer, body: dict[str, Any]) -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
    """The texts of each answer in a stream by their names, and the usage."""
    options = {"stream_options": {"include_usage": True}}
    *events, last = server.events(CHATS, **body | options)
    found: dict[str, dict[str, str]] = {}
    for event in events:
        for choice in event["choices"]:
            own = found.setdefault(choice["index"], {})
            for name in ("content", "reasoning_content", "reasoning"):
                own[name] = own.get(name, "") + (choice["delta"].get(name) or "")
    return found, last["usage"]


def tokens_in(own: Tokenizer, said: str, stage: Any = "before") -> int:
    """How many of the tokens of a text begin in its thought."""
    form = choose_format(TEMPLATE)
    assert form is not None
    reader = ThoughtReader(form, stage, PlainReader())
    read_whole(reader, said)
    ids = own.encode(said, special=False)
    begins = [len(own.decode(ids[:count])) for count in range(len(ids))]
    return sum(reader.begin <= each < reader.end for each in begins)


CASES = [
    ("both", {}, SAID, THOUGHT, CONTENT),
    ("both", {"stop": "34"}, SAID, THOUGHT, "Because 12 < "),
    ("both", {"stop": "a tile"}, SAID, "The roof? It's", ""),
    ("both", {"logprobs": True}, SAID, THOUGHT, CONTENT),
    ("both", {"n": 2}, SAID, THOUGHT, CONTENT),
    ("both", {"include_reasoning": False}, SAID, "", CONTENT),
    ("opened", OPENED, SAID.removeprefix("<think>\n"), THOUGHT, CONTENT),
    ("cut", {}, "<think>\nnever ends", "never ends", ""),
    ("off", OFF, CONTENT, "", CONTENT),
    ("plain", {}, CONTENT, "", CONTENT),
]


@pytest.mark.parametrize(("what", "fields", "said", "thought", "content"), CASES)
def test_thoughts_are_apart_from_content(thinking, llm, what, fields, said, thought, content) -> None:
    answer = thinking.post(CHATS, asked(what, **fields)).json()
    for choice in answer["choices"]:
        message = choice["message"]
        assert (message["content"], message.get("reasoning", "")) == (content, thought)
        assert message.get("reasoning_content", "") == thought
        assert ("reasoning" in message) == (thought != "")
        if "logprobs" in fields:
            assert "".join(token["token"] for token in choice["logprobs"]["content"][:-1]) == said
    texts, usage = streamed(thinking, asked(what, **fields))
    assert len(texts) == len(answer["choices"]) == fields.get("n", 1)
    for own in texts.values():
        assert own == {"content": content, "reasoning_content": thought, "reasoning": thought}
    # whether the prefix cache had the prompt is another matter
    assert usage | {"prompt_tokens_details": 0} == answer["usage"] | {"prompt_tokens_details": 0}
    if "stop" not in fields:
        stage = "inside" if fields is OPENED else "after" if fields is OFF else "before"
        due = tokens_in(llm.get_tokenizer(), said, stage) * fields.get("n", 1)
        assert usage["completion_tokens_details"]["reasoning_tokens"] == due
        assert (due == 0) == (said == CONTENT)


def test_beams_come_at_their_end(thinking) -> None:
    """A script does not reach a search; its text is the model's own."""
    body = asked("beams", beam_width=2, n=2, max_tokens=12, **OPENED)
    answer = thinking.post(CHATS, body).json()
    texts, usage = streamed(thinking, body)
    for choice in answer["choices"]:
        own = texts[choice["index"]]
        assert (own["content"], own["reasoning"]) == (choice["message"]["content"], choice["message"].get("reasoning", ""))
        assert own["content"] == "" != own["reasoning"]
    assert usage["completion_tokens_details"] == answer["usage"]["completion_tokens_details"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]


def test_chunks_grow_by_tokens(thinking) -> None:
    """A thought is told while it grows, and the tokens of thoughts never become fewer."""
    body = asked("both", stream_options={"continuous_usage_stats": True})
    events = thinking.events(CHATS, **body)
    usages = [event["usage"] for event in events if event["choices"] and event["usage"] is not None]
    counts = [usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages]
    assert counts == sorted(counts)
    told = [event["choices"][0]["delta"].get("reasoning") for event in events if event["choices"]]
    assert sum(bool(each) for each in told) > len(THOUGHT) // 8


def test_thoughts_sent_back_go_to_the_template(thinking) -> None:
    """Each template reads them by one of several names."""
    (read,) = read_messages([{"role": "assistant", "content": "y", "reasoning": "z"}])
    assert (read["thinking"], read["reasoning_content"], read["reasoning"]) == ("z", "z", "z")
    messages = [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "reasoning": "z"},
        {"role": "user", "content": "plain"},
    ]  # fmt: skip
    assert thinking.post(CHATS, {"messages": messages, "temperature": 0}).json()["choices"][0]["message"]["content"] == CONTENT


def test_completions_stay_as_they_are(thinking) -> None:
    found = thinking.complete("both", max_tokens=200, temperature=0)
    assert found["choices"][0]["text"] == SAID
    assert "completion_tokens_details" not in found["usage"]
    refused(thinking, "/v1/completions", {"prompt": "a", "include_reasoning": True}, "unsupported", "include_reasoning")


def test_none_leaves_thoughts_in_the_text(folder, tmp_path) -> None:
    with thinking_server(folder, tmp_path, "--reasoning-parser", "none") as server:
        server.say(("both", SAID))
        answer = server.post(CHATS, asked("both")).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": SAID, "refusal": None}
        assert "completion_tokens_details" not in answer["usage"]


def test_the_library_reads_the_same(folder, llm) -> None:
    """LLM.chat has the thoughts of each answer beside its text; a stop string at its beginning ends a thought early."""
    own = LLM(folder, device="cpu", num_blocks=600, max_model_len=2048, chat_template=TEMPLATE)
    messages = [{"role": "user", "content": "Why?"}]
    params = SamplingParams(temperature=0, max_tokens=8, n=2, ignore_eos=True)
    (opened,) = own.chat(messages, params, chat_template_kwargs={"opened": True})
    assert [(one.reasoning, one.content) for one in opened.outputs] == [(one.text.strip(), "") for one in opened.outputs]
    (off,) = own.chat(messages, params, chat_template_kwargs={"enable_thinking": False})
    assert [(one.reasoning, one.content) for one in off.outputs] == [(None, one.text) for one in off.outputs]
    assert own.generate("a", params)[0].outputs[0].reasoning is None
    assert llm.chat(messages, params)[0].outputs[0].content is None
    with pytest.raises(InvalidInput, match="reasoning_parser is 'qwen'"):
        LLM(folder, device="cpu", reasoning_parser="qwen")


def test_a_budget_and_a_grammar_over_the_wire(thinking) -> None:
    pytest.importorskip("llguidance")
    said = asked("cut", structured_outputs={"choice": ["yes", "no"]}, thinking_token_budget=3, max_tokens=60, **OPENED)
    whole = thinking.post(CHATS, said).json()
    message = whole["choices"][0]["message"]
    assert message["content"] in ("yes", "no")
    assert 0 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 4
    texts, _ = streamed(thinking, said)
    assert texts[0] == {
        "content": message["content"],
        "reasoning": message["reasoning"],
        "reasoning_content": message["reasoning"],
    }
    # a completion's grammar has the whole text
    raw = thinking.complete("cut", structured_outputs={"choice": ["yes", "no"]})
    assert raw["choices"][0]["text"] in ("yes", "no")
    near = refused(thinking, CHATS, asked("plain", thinking_budget=5), "unsupported", "thinking_budget")
    assert "thinking_token_budget" in near
    refused(thinking, CHATS, asked("plain", thinking_token_budget=-5), "invalid_value", "thinking_token_budget")
    refused(thinking, CHATS, asked("plain", thinking_token_budget=5, beam_width=2), "invalid_value")


def test_a_required_call_comes_behind_the_thought(folder, tmp_path) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    with thinking_server(folder, tmp_path, "--tool-call-parser", "hermes") as server:
        server.say(("both", SAID))
        body = asked("both", tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=300, **OPENED)
        answer = server.post(CHATS, body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["message"]["reasoning"].endswith(THOUGHT)
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["look"]
        assert choice["finish_reason"] == "tool_calls"
