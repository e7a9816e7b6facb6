"""More than the server can do: what is too much is refused, who leaves gives everything back, and what is late ends."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter

import httpx
import psutil
import pytest

from rooftile.serve import SamplingParams
from rooftile.server import limits
from rooftile.server.http.protocol import ABORT
from rooftile.server.http.sse import EventStream, event
from rooftile.server.keys import new_key
from rooftile.server.observe.log import Account
from tests.server.live import PATIENCE_S, Server
from tests.server.sockets import connect, request, status

KEY, LINE = new_key("ann")
OTHER, OTHER_LINE = new_key("bob")
LONG = {"prompt": "The roof", "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(folder, tmp_path_factory):
    """A server that runs two answers, and lets three wait."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{LINE}\n{OTHER_LINE}\n")
    options = (
        "--max-num-seqs",
        "2",
        "--max-waiting",
        "3",
        "--max-waiting-tokens",
        "300",
        "--api-key-file",
        str(keys),
        "--json",
    )
    with Server(folder, *options) as made:
        made.client.headers["Authorization"] = f"Bearer {KEY}"
        yield made


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
    assert "at most 2 run here" in small.post("/v1/completions", prompt="a", n=3).json()["error"]["message"]


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
        "loop_lag_seconds", "engine_up 1.0",
    ):  # fmt: skip
        assert f"rooftile:{name}" in text, name
    assert "ann" not in text
    assert "tiny" not in text


OVERLOAD_S = 60.0
# the server has places for five: two that run and three that wait
CLIENTS = 10
SHORT = {"temperature": 0, "max_tokens": 6}


class Crowd:
    """W9: twice as many clients as there are places; a fifth vanish, and one in a hundred asks for nonsense.

    Args:
        client: sends their requests.
        due: the answer to each prompt.
    """

    def __init__(self, client: httpx.AsyncClient, due: dict[str, str]) -> None:
        self.client = client
        self.due = due
        self.ends: Counter[str] = Counter()
        self._rng = random.Random(0)

    async def come(self, seconds: float) -> None:
        """Lets all clients ask again and again, for so long."""
        until = time.monotonic() + seconds

        async def one() -> None:
            while time.monotonic() < until:
                patience = self._rng.random() * 0.1 if self._rng.random() < 0.2 else None
                bad = {"n": 17} if self._rng.random() < 0.01 else {}
                self.ends[await self._ask(self._rng.choice(list(self.due)), bad, patience)] += 1
                await asyncio.sleep(self._rng.random() * 0.04)

        await asyncio.wait_for(asyncio.gather(*(one() for _ in range(CLIENTS))), seconds + PATIENCE_S)

    async def _ask(self, prompt: str, bad: dict, patience: float | None) -> str:
        streams = self._rng.random() < 0.5
        try:
            async with asyncio.timeout(patience):
                answer = await self.client.post("/v1/completions", json={"prompt": prompt, "stream": streams} | SHORT | bad)
        except TimeoutError:
            return "gone"
        if answer.status_code != 200:
            return str(answer.status_code)
        if streams:
            *events, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            assert last == "[DONE]"
            text = "".join(json.loads(each)["choices"][0]["text"] for each in events)
        else:
            text = answer.json()["choices"][0]["text"]
        assert not bad
        assert text == self.due[prompt]
        return "answered"


def test_a_minute_of_twice_what_can_be_answered(small, llm) -> None:
    """No hang; the excess has 429; all others have the library's answers; and afterwards all is as before."""
    prompts = [f"The roof {n}" for n in range(40)]
    outputs = llm.generate(prompts, SamplingParams(**SHORT))
    due = {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}
    processes = [psutil.Process(small.process.pid), small.engine]
    before: list = []

    async def test() -> Counter[str]:
        headers = {"Authorization": f"Bearer {KEY}"}
        bounds = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=small.url, limits=bounds, timeout=60, trust_env=False, headers=headers) as client:
            crowd = Crowd(client, due)
            await crowd.come(2)
            # threads that were started for the first ones stay
            before.extend((each.num_threads(), each.memory_info().rss) for each in processes)
            await crowd.come(OVERLOAD_S)
            return crowd.ends

    small.wait_until_idle()
    files = [each.num_fds() for each in processes]
    ends = asyncio.run(test())
    small.wait_until_idle()
    assert set(ends) == {"answered", "429", "400", "gone"}, ends
    assert ends["429"] > 0.05 * ends.total()
    assert ends["answered"] > 0.05 * ends.total()
    until = time.monotonic() + PATIENCE_S
    while [each.num_fds() for each in processes] > files and time.monotonic() < until:
        time.sleep(0.05)
    assert [each.num_fds() for each in processes] <= files
    for process, (threads, memory) in zip(processes, before, strict=True):
        assert process.num_threads() <= threads + 4
        assert process.memory_info().rss - memory < 50e6
    # an idle engine checks its books after a second, and would have died of a leak
    time.sleep(1.2)
    assert small.complete(max_tokens=1)["choices"]


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch) -> None:
    monkeypatch.setattr(limits, "CHUNK_S", 0.05)
    cut, closed, account = [], [], Account()

    async def events():
        yield b"data: x\n\n"

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive():
        return await asyncio.Event().wait()

    async def test() -> None:
        stream = EventStream(events(), lambda: closed.append(True), account)
        await stream({"type": "http", "extensions": {ABORT: {"abort": lambda: cut.append(True)}}}, receive, send)

    asyncio.run(asyncio.wait_for(test(), 10))
    assert (cut, closed, account.end) == ([True], [True], "gone")


def test_a_client_that_leaves_ends_its_stream() -> None:
    closed, account = [], Account()

    async def events():
        while True:
            yield b"data: x\n\n"
            await asyncio.sleep(0.01)

    async def send(message):
        pass

    async def receive():
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    stream = EventStream(events(), lambda: closed.append(True), account)
    asyncio.run(asyncio.wait_for(stream({"type": "http"}, receive, send), 10))
    assert (closed, account.end) == ([True], "gone")


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b\u2029", "a\r\nb", "\x1c\x0b"])
def test_an_event_is_one_line_for_every_client(text) -> None:
    data = event({"text": text}).decode()
    line, empty = data.splitlines()
    assert empty == ""
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
