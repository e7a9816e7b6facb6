"""Bodies that are no JSON, paths, methods and ids: what is refused before or beside a form, and what small routes answer."""

from __future__ import annotations

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from rooftile.server.http.body import parse_object
from rooftile.server.refusals import CODES, Refusal
from tests.server.asking import CHATS, COMPLETIONS, TEXT, refused
from tests.server.inside import ask


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "invalid_json"), (b"{", "invalid_json"), (b"[]", "invalid_json"), (b"null", "invalid_json"),
        (b'{"prompt": NaN}', "invalid_json"), (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "invalid_json"),
        (b"[" * 200_000, "invalid_json"), (b'{"prompt": "a", "x":' + b"[" * 100_000, "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"), (b'{"n": 1' + b"0" * 10_000 + b"}", "invalid_json"),
    ],
)  # fmt: skip
def test_bodies_that_are_no_json(server, data, code) -> None:
    answer = server.client.post(COMPLETIONS, content=data, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize(
    ("data", "twice"),
    [
        (b'{"prompt": "a", "max_tokens": 1, "max_tokens": 9}', True),
        (b'{"prompt": "a", "max_tokens": 1, "max_\\u0074okens": 9}', True),
        (b'{"messages": [{"role": "user", "content": "a", "role": "system"}]}', True),
        (b'{"prompt": "a: \\"b\\": {", "max_tokens": 1, "user": "\\\\"}', False),
        (b'{"prompt": "\\\\\\":", "max_tokens": 1, "metadata": {"max_tokens": 2, ":": {"a": [1, {"a": 2}]}}}', False),
    ],
)
def test_a_name_that_stands_twice_is_refused(data, twice) -> None:
    """A parser keeps the last: the first would be ignored, which perhaps a program on the way has looked at."""
    if not twice:
        assert parse_object(data) == json.loads(data)
        return
    with pytest.raises(Refusal, match="the same name twice") as refused_:
        parse_object(data)
    assert refused_.value.code == "invalid_json"


@hypothesis.settings(deadline=None)
@hypothesis.given(st.recursive(st.none() | st.text() | st.integers(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_names_are_counted_as_they_are_parsed(value) -> None:
    body = {"a": value}
    assert parse_object(json.dumps(body, ensure_ascii=False).encode(errors="replace")) is not None


@pytest.mark.parametrize("coding", ["gzip", "deflate, gzip", "br"])
def test_a_body_in_another_coding_is_refused_by_name(server, coding) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    answer = server.client.post(COMPLETIONS, content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "not_json")
    assert coding in answer.json()["error"]["message"]
    headers["Content-Encoding"] = "identity"
    assert server.client.post(COMPLETIONS, content=b'{"prompt": "a", "max_tokens": 1}', headers=headers).status_code == 200


@pytest.mark.parametrize("given", [("1_0",), ("nan",), ("inf",), ("0",), ("-1",), ("",), ("0x10",), ("5", "abc"), ("1e7",)])
def test_a_timeout_is_one_number(server, given) -> None:
    headers = [("X-Request-Timeout", each) for each in given]
    answer = server.client.post(COMPLETIONS, json=TEXT, headers=headers)
    assert answer.status_code == 400, answer.text
    assert "must be one number of seconds" in answer.json()["error"]["message"]


def test_the_body_is_bounded(server) -> None:
    for size, status in ((4 * 2**20, 400), (4 * 2**20 + 1, 413)):
        body = b'{"prompt":"a","unknown":"' + b"x" * (size - 27) + b'"}'
        assert len(body) == size
        answer = server.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data"])
def test_only_json_is_read(server, kind) -> None:
    answer = server.client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "not_json")


def test_unknown_paths_and_methods(server) -> None:
    for method, path, status, sentence in (
        ("GET", "/v2", 404, "the path '/v2' is none of this server's"),
        ("GET", COMPLETIONS, 405, "the method is GET; this path has POST"),
        ("DELETE", "/v1/models", 405, "this path has GET, HEAD"),
        ("PUT", "/", 405, "this path has GET, HEAD"),
    ):
        answer = server.client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] in CODES
        assert sentence in answer.json()["error"]["message"]


def test_an_error_comes_before_the_first_byte_of_a_stream(server) -> None:
    for fields in ({"n": 17}, {"prompt": [1] * 3000}, {"logit_bias": {"9999": 1}}, {"max_tokens": -1}):
        answer = server.post(COMPLETIONS, TEXT | {"stream": True} | fields)
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/json"


def test_a_request_id_is_taken_if_it_is_a_short_word(server) -> None:
    for given, taken in (("abc-1.2_3", True), ("a" * 128, True), ("a b", False), ("<x>", False)):
        answer = server.client.get("/health", headers={"X-Request-Id": given})
        assert (answer.status_code, answer.headers["x-request-id"] == given) == (200, taken)
    answer = server.client.get("/health", headers={"X-Request-Id": "a" * 129})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert answer.json()["error"]["message"] == "X-Request-Id has 129 characters; may have at most 128"
    assert answer.headers["x-request-id"] != "a" * 129


def test_head_is_get_without_a_body(server) -> None:
    for path in ("/", "/page.js", "/health", "/metrics", "/v1/models", "/openapi.json"):
        head, whole = server.client.head(path), server.client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
        # the series of metrics grow from one to the other
        assert path == "/metrics" or head.headers["content-length"] == whole.headers["content-length"]
    assert server.client.head(COMPLETIONS).status_code == 405


def test_while_the_model_is_read_every_request_says_so() -> None:
    for method, path in (("GET", "/health"), ("POST", COMPLETIONS), ("GET", "/v1/models"), ("POST", "/tokenize")):
        answer = ask(method, path, json={} if method == "POST" else None)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the model is being read, 0 %"
        assert answer.headers["retry-after"] == "2"


def test_a_mistake_of_the_server_shows_nothing(monkeypatch) -> None:
    from rooftile.server.service import Service

    def broken(self):
        raise RuntimeError("secret detail in /secret/path")

    monkeypatch.setattr(Service, "facts", broken)
    answer = ask("GET", "/v1/models", headers={"X-Request-Id": "abc"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the server has made a mistake; its log has it under abc"
    assert "secret" not in answer.text


def test_tokenise_and_back(server, llm) -> None:
    text = "The roof – é😀"
    tokens = server.post("/tokenize", prompt=text).json()
    assert tokens["tokens"] == llm.tokenizer.encode(text)
    assert tokens["count"] == len(tokens["tokens"])
    bare = server.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert server.post("/detokenize", tokens=bare).json() == {"prompt": text}
    talk = [{"role": "user", "content": "hi"}]
    assert server.post("/tokenize", messages=talk).json()["tokens"] == llm.tokenizer.chat(talk)
    refused(server, "/tokenize", {"prompt": "a", "messages": talk}, "invalid_value", "prompt")
    refused(server, "/detokenize", {"tokens": [10**9]}, "invalid_value", "tokens")
    refused(server, "/detokenize", {"tokens": "x"}, "invalid_value", "tokens")


def test_the_schema_describes_every_route(server) -> None:
    found = server.client.get("/openapi.json").json()
    assert set(found["paths"]) >= {
        COMPLETIONS,
        CHATS,
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/health",
        "/metrics",
        "/",
    }
    assert "top_k" in found["components"]["schemas"]["CompletionForm"]["properties"]


def test_the_codes_are_those_of_the_page() -> None:
    from tests.docs.pages import ROOT

    page = (ROOT / "docs" / "how-to" / "run-a-server.md").read_text(encoding="utf-8")
    assert [code for code in CODES if f"`{code}`" not in page] == []
