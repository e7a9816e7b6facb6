"""Bytes of somebody who means harm: no 5xx, no hang, no growth, and the next good request is answered."""

from __future__ import annotations

import asyncio
import random
import struct
from collections import Counter

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooftile.server import limits
from tests.server.sockets import connect, request, send, status

# a tenth of them in `make test`; the sweep makes 5,000 requests, with the 500 of hypothesis
RAW = pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.sweep)])
FORMS = pytest.mark.parametrize("count", [300, pytest.param(2500, marks=pytest.mark.sweep)])
GOOD = {"prompt": "a", "max_tokens": 1}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(autouse=True)
def _answers_the_next(server):
    yield
    assert server.complete(max_tokens=1)["choices"]


@pytest.mark.parametrize(
    ("data", "due"),
    [
        (b"", {None}),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), {400}),
        (b"GET /\r\n\r\n", {400, 403}),
        (b"\r\n" * 100, {None, 408}),
        (b"hello\r\n\r\n", {400}),
        (b"GET / HTTP/3.7\r\n\r\n", {400}),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", {414}),
        (b"GET /" + b"a" * 600_000, {414}),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X%d: y\r\n" % n for n in range(10_000)) + b"\r\n", {431}),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 17_000 + b"\r\n\r\n", {431}),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 900_000, {431}),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX Y: z\r\n\r\n", {400}),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}   ", {400}),
        (HEAD + b"Content-Length: -5\r\n\r\n{}", {400}),
        (HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n{}", {400}),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", {400}),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", {400}),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", {400}),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n{}", {400}),
        (b"GET /health HTTP/1.1\r\n\r\n", {403}),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", {200}),
        (b"GET http://127.0.0.1/health HTTP/1.1\r\nHost: localhost\r\n\r\n", {200, 404}),
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", {404}),
        (b"GET /page.js%00.html HTTP/1.1\r\nHost: localhost\r\n\r\n", {404}),
        (b"GET /%ff%fe HTTP/1.1\r\nHost: localhost\r\n\r\n", {404}),
        (b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404, 405}),
    ],
    ids=range(26),
)  # fmt: skip
def test_what_is_no_good_request(server, data, due) -> None:
    found = status(send(server, data, then_close=False))
    assert found in due


def test_a_head_just_within_its_limit_is_read(server) -> None:
    line = b"GET /health HTTP/1.1\r\n"
    head = b"Host: localhost\r\nX: " + b"y" * (limits.HEADERS_BYTES - 200) + b"\r\n\r\n"
    assert status(send(server, line + head, then_close=False)) == 200
    path = b"/" + b"a" * (limits.REQUEST_LINE_BYTES - 10)
    assert status(send(server, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", then_close=False)) == 404


def test_half_requests_are_given_up(server) -> None:
    whole = request(GOOD)
    for cut in (1, 10, 40, len(whole) - 1):
        assert status(send(server, whole[:cut])) in (None, 400)


def test_chunks_without_end_are_cut_off(server) -> None:
    with connect(server) as made:
        made.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        sent = 0
        try:
            for _ in range(600):
                made.sendall(chunk)
                sent += len(chunk)
            found = made.recv(1000)
        except ConnectionError:
            found = b""
        assert status(found) in (None, 413)
        assert sent < 600 * 65536 or status(found) == 413


def test_requests_in_one_packet_are_answered_one_after_the_other(server) -> None:
    line = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert send(server, line * 3, then_close=False).count(b"HTTP/1.1 200") == 3


@RAW
def test_random_bytes_do_no_harm(server, count: int) -> None:
    rng = random.Random(0)
    before = psutil.Process(server.process.pid).memory_info().rss
    whole = request(GOOD)
    seen = set()
    for _ in range(count):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with connect(server) as made:
            made.sendall(bytes(data[: rng.randrange(1, len(data) + 1)]))
            if rng.random() < 0.3:
                # a reset in place of an end
                made.setsockopt(1, 13, struct.pack("ii", 1, 0))
            elif rng.random() < 0.5:
                made.shutdown(1)
                made.settimeout(5)
                seen.add(status(made.recv(1000)))
    assert not [each for each in seen if each is not None and each >= 500], seen
    server.wait_until_idle()
    assert psutil.Process(server.process.pid).memory_info().rss - before < 50e6


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "prompt", "messages", "model", "n", "best_of", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stream",
        "stream_options", "seed", "logprobs", "echo", "logit_bias", "beam_width", "response_format", "structured_outputs",
        "stop_token_ids", "allowed_token_ids", "bad_words", "cache_salt", "top_logprobs", "tools", "truncate_prompt_tokens",
        "min_tokens", "length_penalty",
    ]
)  # fmt: skip
ROUTES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/tokenize": {},
    "/detokenize": {},
}


def any_json(count: int):
    """Runs a test `count` times, each with fields of odd values and a route."""
    bounds = settings(max_examples=count, suppress_health_check=[HealthCheck.function_scoped_fixture])
    return lambda test: bounds(given(st.dictionaries(NAMES, VALUES, max_size=5), st.sampled_from(list(ROUTES)))(test))


@any_json(60)
def test_some_json_is_answered_or_refused(server, fields, path) -> None:
    assert_answered_or_refused(server, fields, path)


@pytest.mark.sweep
@any_json(500)
def test_any_json_is_answered_or_refused(server, fields, path) -> None:
    assert_answered_or_refused(server, fields, path)


def assert_answered_or_refused(server, fields, path) -> None:
    answer = server.post(path, ROUTES[path] | fields)
    assert answer.status_code in (200, 400, 404), (fields, answer.text)


ODD = [
    None, True, 0, -1, 1, 2**70, 1e308, -1e-9, "", "a", "\u0000", "x" * 500, [], [[]], [None], {}, {"a": 1}, ["a"] * 40, [1] * 40,
    [-1], {"type": "json_object"}, {"1": 1}, {"json": {}}, {"regex": "a"}, {"include_usage": True},
    [{"role": "user", "content": "a"}],
]  # fmt: skip


@FORMS
def test_forms_of_the_schema_with_odd_values(server, count: int) -> None:
    """Every field of /openapi.json, alone and with others, with values of its kind and of others."""
    rng = random.Random(1)
    document = server.client.get("/openapi.json").json()
    forms = {
        path: list(document["components"]["schemas"][way["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                   .rpartition("/")[2]]["properties"])
        for path, way in document["paths"].items() if "post" in way
    }  # fmt: skip
    assert forms.keys() >= ROUTES.keys()
    before = psutil.Process(server.process.pid).memory_info().rss

    async def some(client: httpx.AsyncClient) -> Counter[int]:
        seen: Counter[int] = Counter()
        for _ in range(count // 10):
            path = rng.choice(list(ROUTES))
            fields = {name: rng.choice(ODD) for name in rng.sample(forms[path], min(len(forms[path]), rng.randrange(1, 4)))}
            answer = await client.post(path, json=ROUTES[path] | fields)
            seen[answer.status_code] += 1
            assert answer.status_code in (200, 400, 404), (fields, answer.text)
        return seen

    async def all_of_them() -> Counter[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) as client:
            return sum(await asyncio.gather(*(some(client) for _ in range(10))), Counter())

    seen = asyncio.run(all_of_them())
    assert sum(seen.values()) == count
    assert seen[200] > count / 80
    server.wait_until_idle()
    assert psutil.Process(server.process.pid).memory_info().rss - before < 50e6


def test_no_client_keeps_a_connection_that_it_does_not_use(server) -> None:
    idle = [connect(server) for _ in range(50)]
    try:
        assert server.complete(max_tokens=1)["choices"]
    finally:
        for each in idle:
            each.close()
