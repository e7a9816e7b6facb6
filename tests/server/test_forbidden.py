"""Forbidden tokens over HTTP: a request that allows nothing is refused, and an answer that cannot go on says why."""

from __future__ import annotations

import json

SENTENCE = "every token is forbidden here, by allowed_token_ids and bad_words"


def asked(llm) -> dict:
    """Two tokens are allowed, and none of them after the first."""
    encode = llm.get_tokenizer().encode
    pairs = [one + other for one in "QX" for other in "QX"]
    assert all(len(encode(pair, special=False)) == 2 for pair in pairs)
    allowed = [token for letter in "QX" for token in encode(letter, special=False)]
    return {"allowed_token_ids": allowed, "bad_words": pairs, "max_tokens": 9}


def test_an_answer_that_no_token_may_follow_says_why(server, llm) -> None:
    for choice in server.complete(**asked(llm), n=3, seed=1)["choices"]:
        assert choice["text"] in ("Q", "X")
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", SENTENCE)
    # a stop string, which cannot come, makes the engine's process write the texts
    streamed = server.post("/v1/completions", prompt="The roof", stream=True, stop="zz", **asked(llm))
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
    ends = [choice for line in lines for choice in json.loads(line)["choices"] if choice["finish_reason"]]
    assert [(choice["finish_reason"], choice["stop_reason"]) for choice in ends] == [("abort", SENTENCE)]


def test_a_request_that_allows_nothing_is_refused(server, llm) -> None:
    fields = asked(llm) | {"bad_words": ["Q", " X"]}
    answer = server.post("/v1/completions", prompt="The roof", **fields)
    assert answer.status_code == 400
    due = "every token is forbidden where the answer begins, by allowed_token_ids and bad_words: allow another"
    assert answer.json()["error"]["message"] == due


def test_samples_beyond_the_slots_are_answered(small) -> None:
    """Three samples where two answers run."""
    fields = {"max_tokens": 5, "ignore_eos": True, "temperature": 1.0}
    found = small.complete(n=3, seed=3, **fields)["choices"]
    alone = [small.complete(seed=3 + n, **fields)["choices"][0] for n in range(3)]
    assert [choice["text"] for choice in found] == [choice["text"] for choice in alone]
