"""Each row of the limits, just below and just above: what is allowed is answered, and what is more is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rooftile.server import limits
from tests.server.test_structured import nested

COMPLETIONS, CHATS, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"


def padded(size: int) -> dict:
    """Returns a schema of so many bytes."""
    head = '{"type":"boolean","description":""}'
    return {"type": "boolean", "description": "x" * (size - len(head))}


def deep(levels: int) -> Any:
    """Returns lists in each other."""
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


def message(**fields: Any) -> list[dict]:
    return [{"role": "user", "content": "a"} | fields]


# what it is, the route, the body by a number, and the largest number that is allowed
ROWS = [
    ("bytes of a prompt", TOKENIZE, lambda n: {"prompt": "a" * n}, limits.PROMPT_BYTES),
    ("messages", TOKENIZE, lambda n: {"messages": message() * n}, limits.MESSAGES),
    ("prompts", COMPLETIONS, lambda n: {"prompt": ["a"] * n, "max_tokens": 1}, limits.PROMPTS),
    ("answers", COMPLETIONS, lambda n: {"prompt": ["a"] * (n // 16), "n": 16, "max_tokens": 1}, limits.ANSWERS),
    ("n", COMPLETIONS, lambda n: {"prompt": "a", "n": n, "max_tokens": 1}, 16),
    ("best_of", COMPLETIONS, lambda n: {"prompt": "a", "best_of": n, "max_tokens": 1}, limits.BEST_OF),
    ("beam_width", COMPLETIONS, lambda n: {"prompt": "a", "beam_width": n, "max_tokens": 1}, 16),
    ("logprobs", COMPLETIONS, lambda n: {"prompt": "a", "logprobs": n, "max_tokens": 1}, 20),
    ("top_logprobs", CHATS, lambda n: {"messages": message(), "logprobs": True, "top_logprobs": n, "max_tokens": 1}, 20),
    ("stops", COMPLETIONS, lambda n: {"prompt": "a", "stop": ["xyz"] * n, "max_tokens": 1}, 16),
    ("characters of a stop", COMPLETIONS, lambda n: {"prompt": "a", "stop": "x" * n, "max_tokens": 1}, 256),
    (
        "biases", COMPLETIONS,
        # 007 and 0007 are two keys, and one token
        lambda n: {"prompt": "a", "logit_bias": {f"{k % 300:0{3 + k // 300}d}": 1 for k in range(n)}, "max_tokens": 1},
        limits.BIASES,
    ),
    (
        "characters of a salt", COMPLETIONS,
        lambda n: {"prompt": "a", "cache_salt": "s" * n, "max_tokens": 1}, limits.NAME_CHARACTERS,
    ),
    ("characters of a role", TOKENIZE, lambda n: {"messages": message(role="r" * n)}, limits.NAME_CHARACTERS),
    ("depth of JSON", COMPLETIONS, lambda n: {"prompt": "a", "max_tokens": 1, "metadata": {"a": deep(n - 2)}}, limits.JSON_DEPTH),
    (
        "bytes of a schema", COMPLETIONS,
        lambda n: {"prompt": "a", "structured_outputs": {"json": padded(n)}, "max_tokens": 1}, limits.SCHEMA_BYTES,
    ),
    (
        "levels of a schema", COMPLETIONS,
        lambda n: {"prompt": "a", "structured_outputs": {"json": nested(n)}, "max_tokens": 1}, limits.SCHEMA_DEPTH,
    ),
    (
        "bytes of a regex", COMPLETIONS,
        lambda n: {"prompt": "a", "structured_outputs": {"regex": "a" * n}, "max_tokens": 1}, limits.REGEX_BYTES,
    ),
    (
        "choices", COMPLETIONS,
        lambda n: {"prompt": "a", "structured_outputs": {"choice": [f"a{k}" for k in range(n)]}, "max_tokens": 1},
        limits.CHOICES,
    ),
]  # fmt: skip
# a template or a grammar may refuse what the limit allows, for a reason of its own
OTHER_REASONS = {"messages": "steps without an end", "levels of a schema": "cannot be used", "characters of a role": "template"}


@pytest.mark.parametrize(("what", "path", "body", "most"), ROWS, ids=[row[0] for row in ROWS])
def test_just_below_and_just_above(server, what: str, path: str, body: Any, most: int) -> None:
    below = server.post(path, body(most))
    if below.status_code != 200:
        assert what in OTHER_REASONS, below.text
        assert OTHER_REASONS[what] in below.json()["error"]["message"]
    above = server.post(path, body(most + (16 if what == "answers" else 1)))
    assert above.status_code == 400, above.text
    error = above.json()["error"]
    # the sentence has a number of the limit, or of what came
    assert any(f"{number:,}" in error["message"] or str(number) in error["message"] for number in (most, most + 1)), error
    assert OTHER_REASONS.get(what, "\0") not in error["message"]
    assert server.complete(max_tokens=1)["choices"]


def test_the_names_of_a_request_and_of_a_model(server) -> None:
    longest = "a" * limits.NAME_CHARACTERS
    assert server.client.get("/v1/models", headers={"X-Request-Id": longest}).headers["x-request-id"] == longest
    assert server.client.get("/v1/models", headers={"X-Request-Id": longest + "a"}).status_code == 400
    wrong = server.post(COMPLETIONS, prompt="a", model=longest).json()["error"]
    assert (wrong["code"], longest in wrong["message"]) == ("model_not_found", True)
    long = server.post(COMPLETIONS, prompt="a", model=longest + "a").json()["error"]
    assert (long["code"], long["param"]) == ("invalid_value", "model")
    assert long["message"].endswith("; must have at most 128 characters")
