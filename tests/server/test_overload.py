"""More than the server can do: what is too much is refused, who leaves gives everything back, and what is late ends."""

from __future__ import annotations

import json
import socket
import struct
import time

from tests.server.live import PATIENCE_S, Server
from tests.server.small import KEY, OTHER
from tests.server.sockets import connect, request, status

LONG = {"prompt": "The roof", "max_tokens": 1500, "ignore_eos": True}


class Holder:
    """Streams that are kept open, each by a connection of its own."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.sockets: list = []

    def open(self, **fields: object) -> bytes:
        """Opens one more; returns the beginning of the answer."""
        made = connect(self.server, PATIENCE_S)
        made.sendall(request(LONG | fields, f"Authorization: Bearer {KEY}"))
        self.sockets.append(made)
        return made.recv(100) if fields.get("stream") else b""

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self.sockets:
            each.close()


def wait_for(server: Server, **due: float) -> None:
    """Waits until metrics have these values."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        found = {name: server.metric(name) for name in due}
        if found == due:
            return
        time.sleep(0.02)
    raise AssertionError(f"due {due}, found {found}")


def test_the_queue_is_bounded_and_who_leaves_gives_everything_back(small) -> None:
    with Holder(small) as holder:
        for _ in range(2):
            assert status(holder.open(stream=True)) == 200
        for n in range(3):
            holder.open(stream=n == 1) if n == 1 else holder.open()
            wait_for(small, num_requests_waiting=n + 1)
        assert small.metric("num_requests_running") == 2
        # refused without a look at the body, which is none
        refused = small.client.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert "3 answers wait, as many as may (--max-waiting); try again in" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert small.metric("rejected_total", reason="queue_full") >= 1
        # one that waits without a stream leaves, and one that runs
        holder.sockets.pop(2).close()
        wait_for(small, num_requests_waiting=2)
        holder.sockets.pop(0).close()
        wait_for(small, num_requests_waiting=1)
        assert small.client.get("/health").status_code == 200
    small.wait_until_idle()


def test_a_client_that_has_sent_its_next_request_and_leaves_is_aborted(small) -> None:
    """uvicorn tells only the newest request of a connection that its client is gone."""
    before = small.metric("request_success_total", finished_reason="abort")
    with Holder(small) as holder:
        made = connect(small, PATIENCE_S)
        holder.sockets.append(made)
        key = f"Authorization: Bearer {KEY}"
        made.sendall(request(LONG | {"stream": True}, key) + request(LONG, key))
        assert status(made.recv(100)) == 200
        # so that the first write after it fails
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    small.wait_until_idle()
    assert small.metric("request_success_total", finished_reason="abort") == before + 1


def test_prompt_tokens_that_wait_are_bounded(small) -> None:
    with Holder(small) as holder:
        for _ in range(2):
            holder.open(stream=True)
        holder.open(prompt=[5] * 200)
        wait_for(small, queued_prompt_tokens=200)
        refused = small.post("/v1/completions", prompt=[5] * 101)
        assert refused.status_code == 429
        why = "the queue holds 200 prompt tokens and the request has 101; 300 may wait (--max-waiting-tokens)"
        assert why in refused.json()["error"]["message"]
    small.wait_until_idle()
    assert small.post("/v1/completions", prompt=[5] * 301).json()["error"]["code"] == "invalid_value"
    # more samples than run at once wait for each other
    assert len(small.post("/v1/completions", prompt="a", n=3).json()["choices"]) == 3


def test_a_deadline_ends_a_request(small) -> None:
    headers = {"X-Request-Timeout": "0.3"}
    late = small.client.post("/v1/completions", json=LONG, headers=headers)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    with small.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}, headers=headers) as answer:
        assert answer.status_code == 200
        *_, told, done = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert json.loads(told)["error"]["code"] == "deadline_exceeded"
    assert done == "[DONE]"
    for wrong in ("0", "-1", "nan", "soon", "1e9"):
        assert small.client.post("/v1/completions", json=LONG, headers={"X-Request-Timeout": wrong}).status_code == 400
    small.wait_until_idle()


def test_keys_share_no_prefixes(small) -> None:
    body = {"prompt": list(range(30, 94)), "max_tokens": 1}

    def cached(key: str) -> int:
        answer = small.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(KEY), cached(KEY), cached(OTHER), cached(OTHER)] == [0, 48, 0, 48]


def test_the_log_has_a_line_per_request_and_no_prompt(small) -> None:
    small.client.post(
        "/v1/completions",
        json={"prompt": "zebra zebra", "max_tokens": 3, "ignore_eos": True},
        headers={"X-Request-Id": "mine"},
    )
    line = json.loads(small.wait_for(r'(\{[^\n]*"id": "mine"[^\n]*)\n'))
    assert line["key"] == "ann"
    assert (line["status"], line["end"], line["completion_tokens"]) == (200, "length", 3)
    assert line["prompt_tokens"] > 3
    assert 0 < line["first_token_s"] <= line["seconds"]
    text = "".join(small.lines)
    assert "zebra" not in text
    assert KEY not in text


def test_metrics_count_what_was_done(small) -> None:
    before = {name: small.metric(name) for name in ("prompt_tokens_total", "generation_tokens_total")}
    ended = small.metric("request_success_total", finished_reason="length")
    usage = small.complete(max_tokens=7, ignore_eos=True)["usage"]
    assert small.metric("prompt_tokens_total") - before["prompt_tokens_total"] == usage["prompt_tokens"]
    assert small.metric("generation_tokens_total") - before["generation_tokens_total"] == 7
    assert small.metric("request_success_total", finished_reason="length") == ended + 1
    aborted = small.metric("request_success_total", finished_reason="abort")
    late = small.client.post("/v1/completions", json=LONG | {"n": 2}, headers={"X-Request-Timeout": "0.5"})
    assert late.status_code == 504, late.text
    assert small.metric("request_success_total", finished_reason="abort") == aborted + 2
    hits = small.metric("prefix_cache_hits_total")
    for _ in range(2):
        small.post("/v1/completions", prompt=list(range(130, 194)), max_tokens=1)
    assert small.metric("prefix_cache_queries_total") > small.metric("prefix_cache_hits_total") >= hits + 48
    text = small.client.get("/metrics").text
    for name in (
        "kv_cache_usage_perc", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_count", "num_preemptions_total", "kv_waste_ratio", "step_seconds_sum",
        "host_step_seconds_sum",
        "loop_lag_seconds", 'engine_up{model_name="tiny"} 1.0',
    ):  # fmt: skip
        assert f"rooftile:{name}" in text, name
    assert "ann" not in text
