"""Forms that are refused: the status, the code, the field and the sentence, in OpenAI's form."""

from __future__ import annotations

import pytest

from tests.server.asking import CHATS, COMPLETIONS, TALK, TEXT, refused


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("n", 17, "n is 17; must be a whole number from 1 to 16"),
        ("n", 0, "from 1 to 16"),
        ("n", True, "n is true; must be a whole number"),
        ("n", "2", "n is '2'; must be a whole number"),
        ("n", 1.5, "n is 1.5"),
        ("best_of", 17, "from n, which is 1, to 16"),
        ("logprobs", 21, "from 0 to 20"),
        ("temperature", -0.1, "temperature is -0.1"),
        ("temperature", "hot", "temperature is 'hot'; must be a number"),
        ("stream", "yes", "stream is 'yes'; must be true or false"),
        ("user", 5, "user is 5; must be a text"),
        ("top_p", 0, "top_p is 0"),
        ("top_p", 1.1, "at most 1"),
        ("top_k", -2, "top_k is -2"),
        ("min_p", 2, "min_p is 2"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", -3, "from -2 to 2"),
        ("repetition_penalty", 0, "above 0"),
        ("seed", -1, "seed is -1"),
        ("max_tokens", -1, "max_tokens is -1"),
        ("max_tokens", 2**64, f"max_tokens is {2**64}; must be a whole number from 1 to {2**63 - 1}"),
        ("top_k", 10**25, f"must be a whole number from 0 to {2**63 - 1}"),
        ("truncate_prompt_tokens", 10**25, f"must be a whole number from 1 to {2**63 - 1}"),
        ("stop_token_ids", [10**25], "the model has 0 to"),
        ("allowed_token_ids", [10**25], "the model has 0 to"),
        ("temperature", 10**400, "must be a finite number"),
        ("min_tokens", 5, "min_tokens is 5 and max_tokens 1"),
        ("stop", ["a"] * 17, "at most 16"),
        ("stop", "a" * 257, "1 to 256 characters"),
        ("stop", [""], "1 to 256 characters"),
        ("stop", 5, "stop is 5"),
        ("logit_bias", {str(n): 1 for n in range(1025)}, "at most 1,024"),
        ("logit_bias", {"9999": 1}, "the model has 0 to"),
        ("logit_bias", {"x": 1}, "token ids"),
        ("logit_bias", {"5": 101}, "from -100 to 100"),
        ("logit_bias", [], "an object"),
        ("stop_token_ids", ["x"], "token ids"),
        ("allowed_token_ids", [], "empty"),
        ("beam_width", 17, "from 1 to 16"),
        ("length_penalty", 2.0, "without beam_width"),
        ("cache_salt", "s" * 129, "; must have at most 128 characters"),
        ("prompt", [], "must have from 1"),
        ("prompt", [[]], "must have from 1"),
        ("prompt", [1, "a"], "a list of token ids"),
        ("prompt", [-1], "outside of 0 to"),
        ("prompt", [10**30], "outside of 0 to"),
        ("prompt", [1] * 3000, "3,000 tokens"),
        ("prompt", 5, "a text"),
        ("prompt", None, "a text"),
        ("prompt", ["a"] * 65, "at most 64"),
        ("prompt", "a" * (2**20 + 1), "1048577"),
        ("stream_options", {"include_usage": True}, "without stream"),
    ],
)
def test_a_value_out_of_bounds_names_its_field(server, field, value, sentence) -> None:
    message = refused(server, COMPLETIONS, TEXT | {field: value}, "invalid_value", field)
    assert sentence in message


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 16, "max_tokens": 1}, {"logprobs": 20}, {"stop": ["a" * 256] * 16}, {"beam_width": 16}, {"cache_salt": "s" * 128},
        {"prompt": ["a"] * 64}, {"prompt": ["a"] * 8, "n": 16}, {"best_of": 16}, {"logit_bias": {str(n): 1 for n in range(300)}},
        {"seed": 2**63 - 1}, {"temperature": 0}, {"temperature": 1e30}, {"top_k": -1}, {"stop": None, "n": None, "seed": None},
        {"prompt": [5] * 2040}, {"temperature": 10**25}, {"repetition_penalty": 10**30}, {"stop": "\0"},
        {"top_k": 2**63 - 1},
    ],
)  # fmt: skip
def test_just_within_the_bounds_is_answered(server, fields) -> None:
    assert server.complete(**(TEXT | fields))["choices"]


def test_answers_of_a_request_are_bounded_in_all(server) -> None:
    message = refused(server, COMPLETIONS, TEXT | {"prompt": ["a"] * 9, "n": 15}, "invalid_value", "n")
    assert "128 in all" in message


@pytest.mark.parametrize(
    ("path", "body", "near"),
    [
        (COMPLETIONS, TEXT | {"max_token": 5}, "max_tokens"),
        (COMPLETIONS, TEXT | {"temprature": 1}, "temperature"),
        (CHATS, TALK | {"max_completion_token": 5}, "max_completion_tokens"),
        (CHATS, TALK | {"top_logprob": 5, "logprobs": True}, "top_logprobs"),
        ("/tokenize", {"promt": "x"}, "prompt"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(server, path, body, near) -> None:
    assert f"did you mean {near}?" in refused(server, path, body, "unknown_field")


def test_unknown_fields_inside_of_others_are_refused(server) -> None:
    body = TALK | {"messages": [{"role": "user", "content": "a", "contents": "b"}]}
    assert "did you mean content?" in refused(server, CHATS, body, "unknown_field", "messages[0].contents")
    options = TEXT | {"stream": True, "stream_options": {"usage": True}}
    said = refused(server, COMPLETIONS, options, "unknown_field", "stream_options.usage")
    assert "did you mean include_usage?" in said
    refused(server, COMPLETIONS, TEXT | {"stream": True, "stream_options": [1]}, "invalid_value", "stream_options")
    refused(server, COMPLETIONS, TEXT | {"metadata": 1}, "invalid_value", "metadata")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHATS, {"functions": [{}]}),
        (CHATS, {"audio": {}}),
        (CHATS, {"modalities": ["audio"]}),
        (COMPLETIONS, {"reasoning_effort": "high"}),
        (CHATS, {"chat_template": "{{ 1 }}"}),
        (COMPLETIONS, {"chat_template_kwargs": {"x": "{% for i in range(9**9) %}{% endfor %}"}}),
        (
            CHATS,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}]},
        ),
        (COMPLETIONS, {"suffix": "b"}),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}),
        (COMPLETIONS, {"logits_processors": ["os.system"]}),
    ],
)
def test_what_is_missing_here_is_refused_in_a_sentence(server, path, fields) -> None:
    refused(server, path, (TEXT if path == COMPLETIONS else TALK) | fields, "unsupported")


def test_store_is_refused(server) -> None:
    refused(server, CHATS, TALK | {"store": True}, "invalid_value", "store")


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "at least one"), ("hi", "a list"), ([1], "a list"), ([{"role": "user"}], "content is missing"),
        ([{"content": "x"}], "role is missing"), ([{"role": 5, "content": "x"}], "role is 5"),
        ([{"role": "user", "content": 5}], "a text"), ([{"role": "r" * 129, "content": "x"}], "128 characters"),
        ([{"role": "user", "content": "x"}] * 1025, "at most 1,024"),
        ([{"role": "system", "content": "x"}], "no system here"),
        ([{"role": "user", "content": [{"type": "text", "texts": "a"}]}], "a part without a text"),
        ([{"role": "user", "content": None}], "content is null"), ([{"role": "user", "content": [5]}], "a list of parts"),
        ([{"role": "user", "content": "a", "name": 5}], "name is 5"),
        ([{"role": "assistant", "reasoning": {}}], "reasoning is {}"),
    ],
)  # fmt: skip
def test_messages_are_checked(server, messages, sentence) -> None:
    answer = server.post(CHATS, TALK | {"messages": messages})
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]
    assert "/" not in answer.json()["error"]["message"], "a path of the server"


def test_a_list_of_text_parts_is_a_text(server) -> None:
    """The parts are joined by newlines, as vLLM joins them."""
    parts = [{"type": "text", "text": "The", "cache_control": {"type": "ephemeral"}}, {"type": "input_text", "text": "roof"}, "!"]
    found = [
        server.post(CHATS, {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 4}).json()
        for content in (parts, "The\nroof\n!")
    ]
    assert found[0]["choices"] == found[1]["choices"]
    assert found[0]["usage"]["prompt_tokens"] == found[1]["usage"]["prompt_tokens"]
