"""Fields and routes of vLLM's server: token ids, special tokens of prompts, priorities, /version, /ping and /load."""

from __future__ import annotations

import pytest

import rooftile
from rooftile import SamplingParams
from tests.server.asking import CHATS, COMPLETIONS, TALK, TEXT, refused
from tests.server.small import KEY

TALK_WITH_TWO = {"messages": [{"role": "user", "content": "The roof"}], "temperature": 0, "max_tokens": 6, "n": 2}


def due_of(llm, prompt: list[int], **asked) -> list[int]:
    return llm.generate(prompt, SamplingParams(temperature=0, **asked))[0].outputs[0].token_ids


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"stop": "qq"}, {"echo": True}])
def test_token_ids_of_prompts_and_answers(server, llm, more) -> None:
    asked = {"prompt": ["The roof", "A tile é"], "temperature": 0, "max_tokens": 6, "return_token_ids": True} | more
    prompts = [llm.tokenizer.encode(text) for text in asked["prompt"]]
    due = [due_of(llm, prompt, max_tokens=6) for prompt in prompts]
    whole = server.post(COMPLETIONS, asked).json()
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == prompts
    assert [choice["token_ids"] for choice in whole["choices"]] == due
    assert all((choice["logprobs"] is not None) == ("logprobs" in more) for choice in whole["choices"])
    begun, found = {}, {0: [], 1: []}
    for chunk in server.events(COMPLETIONS, **asked):
        for choice in chunk["choices"]:
            if "prompt_token_ids" in choice:
                assert choice["index"] not in begun
                begun[choice["index"]] = choice["prompt_token_ids"]
            found[choice["index"]] += choice["token_ids"]
    assert [begun[0], begun[1]] == prompts
    assert [found[0], found[1]] == due


def test_token_ids_of_chats(server, llm) -> None:
    prompt = llm.tokenizer.chat(TALK_WITH_TWO["messages"])
    whole = server.post(CHATS, TALK_WITH_TWO | {"return_token_ids": True}).json()
    assert whole["prompt_token_ids"] == prompt
    due = due_of(llm, prompt, max_tokens=6)
    assert [choice["token_ids"] for choice in whole["choices"]] == [due, due]
    first, *others = server.events(CHATS, **TALK_WITH_TWO, return_token_ids=True)
    assert first["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk for chunk in others)
    found = {0: [], 1: []}
    for chunk in others:
        for choice in chunk["choices"]:
            found[choice["index"]] += choice.get("token_ids", [])
    assert found == {0: due, 1: due}
    plain = server.post(CHATS, TALK_WITH_TWO).json()
    assert "token_ids" not in plain["choices"][0]
    assert "prompt_token_ids" not in plain


def test_special_tokens_of_prompts(server, llm) -> None:
    encode, talk = llm.tokenizer.encode, TALK["messages"]
    chat = llm.tokenizer.chat(talk)
    begin = encode("")
    assert len(begin) == 1
    for path, body, given, due in (
        (COMPLETIONS, TEXT, None, encode("a")), (COMPLETIONS, TEXT, True, encode("a")),
        (COMPLETIONS, TEXT, False, encode("a", False)), (CHATS, TALK, None, chat), (CHATS, TALK, False, chat),
        (CHATS, TALK, True, begin + chat),
    ):  # fmt: skip
        answer = server.post(path, body | {"add_special_tokens": given, "return_token_ids": True}).json()
        assert (answer if path == CHATS else answer["choices"][0])["prompt_token_ids"] == due
        name = "messages" if path == CHATS else "prompt"
        tokens = server.post("/tokenize", {name: body[name], "add_special_tokens": given, "return_token_strs": True}).json()
        assert tokens["tokens"] == due
        assert tokens["token_strs"] == [llm.tokenizer.token(id) for id in due]
    assert "token_strs" not in server.post("/tokenize", prompt="a").json()


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("priority", 1.5, "priority is 1.5; must be a whole number"),
        ("priority", "high", "priority is 'high'; must be a whole number"),
        ("priority", 2 * 10**9, "priority is 2000000000; must be a whole number from -1000000000 to 1000000000"),
        ("return_token_ids", 1, "return_token_ids is 1; must be true or false"),
        ("add_special_tokens", "no", "add_special_tokens is 'no'; must be true or false"),
        ("cache_salt", "a" * 10**6, "cache_salt is '" + 27 * "a" + "..." + 28 * "a" + "'; must have at most 128"),
        ("cache_salt", 7, "cache_salt is 7; must be a text"),
        ("return_tokens_ids", True, "'return_tokens_ids' is no field; did you mean return_token_ids?"),
        ("prioriti", 1, "'prioriti' is no field; did you mean priority?"),
    ],
)
def test_what_is_refused(server, field, value, sentence) -> None:
    for path, body in ((COMPLETIONS, TEXT), (CHATS, TALK)):
        code = "unknown_field" if "no field" in sentence else "invalid_value"
        assert refused(server, path, body | {field: value}, code, field).startswith(sentence)


def test_a_search_has_no_token_ids(server) -> None:
    said = refused(server, COMPLETIONS, TEXT | {"beam_width": 2, "return_token_ids": True}, "invalid_value", "return_token_ids")
    assert said.startswith("return_token_ids is given with beam_width")


def test_a_priority_is_taken(server) -> None:
    for priority in (-(10**9), -1, 0, 5, 10**9):
        assert server.post(COMPLETIONS, TEXT | {"priority": priority}).status_code == 200


def test_small_routes(server, small) -> None:
    assert server.client.get("/version").json() == {"version": rooftile.__version__}
    for method in ("GET", "POST", "HEAD"):
        assert server.client.request(method, "/ping").status_code == 200
    assert server.client.get("/load").json() == {"server_load": 0}
    long = TEXT | {"max_tokens": 4000, "stream": True, "ignore_eos": True}
    with server.client.stream("POST", COMPLETIONS, json=long) as answer:
        next(answer.iter_lines())
        assert server.client.get("/load").json() == {"server_load": 1}
    # probes have no key; who asks for more has one
    bare = {"Authorization": ""}
    assert small.client.get("/ping", headers=bare).status_code == 200
    for path in ("/version", "/load"):
        assert small.client.get(path, headers=bare).status_code == 401
        assert small.client.get(path, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
