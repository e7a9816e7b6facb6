"""Two engines behind one API: prompts find their blocks, a dead engine takes only its own requests along, and comes back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil

from rooftile.server.replicas import replica
from tests.server.living import Living, living

PATIENCE_S = 240.0
# blocks of 16 tokens: twelve whole ones
FAMILIES = [[3 + family] * 192 for family in range(6)]


async def until(holds: Any) -> None:
    """Returns when a condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.02)


async def states(it: Living) -> list[str]:
    answer = await it.client.get("/health")
    assert answer.status_code == 200
    return answer.json()["replicas"]


async def both_answer(it: Living) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await states(it) != ["ready", "ready"]:
            await asyncio.sleep(0.05)


async def series(it: Living, name: str) -> list[float]:
    text = (await it.client.get("/metrics")).text
    return [float(value) for value in re.findall(rf'^rooftile:{name}{{.*replica="\d"}} (\S+)$', text, re.MULTILINE)]


async def cached(it: Living, prompt: list[int]) -> int:
    answer = await it.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def begun(it: Living, prompt: list[int], **fields: Any) -> asyncio.Task[list[Any]]:
    """Returns a stream that has its first token."""
    first = asyncio.Event()
    task = asyncio.create_task(it.stream(first, prompt=prompt, **fields))
    await asyncio.wait({task, asyncio.create_task(first.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert not task.done(), task.result()
    return task


def held(it: Living) -> list[int]:
    return [each.engine.requests for each in it.service.engines.all]


async def prompts_find_their_blocks(it: Living) -> None:
    """Each family is read once; whatever comes between, its next prompt goes where its blocks are."""
    # read at once, so that both engines have some of them
    assert await asyncio.gather(*(cached(it, family) for family in FAMILIES)) == [0] * len(FAMILIES)
    for more in range(3):
        for family in FAMILIES if more % 2 else reversed(FAMILIES):
            assert await cached(it, [*family, 20 + more]) == 192
    hits = await series(it, "replica_prefix_cache_hits_total")
    assert sum(hits) == 3 * len(FAMILIES) * 192
    assert min(hits) >= 192, "one engine alone has answered"


async def a_dead_engine_takes_its_own_along(it: Living) -> None:
    streams = [await begun(it, [5 + place], max_tokens=200) for place in range(4)]
    assert held(it) == [2, 2]
    dead = it.service.engines.all[0].engine
    dead.process.kill()
    await until(lambda: dead.cause is not None)
    # the others are answered as if nothing had happened, and so is whoever comes now
    assert [await cached(it, [9, place]) for place in range(4)] == [0] * 4
    assert (await states(it))[1] == "ready"
    assert (await states(it))[0] in ("down", "loading")
    assert await series(it, "replica_up") == [0.0, 1.0]
    assert it.service.admission.max_waiting == 3
    ends = await asyncio.gather(*streams)
    told = [events[-2]["error"]["code"] for events in ends if "error" in events[-2]]
    assert told == ["engine_down"] * 2
    assert [events[-2]["choices"][0]["finish_reason"] for events in ends if "error" not in events[-2]] == ["length"] * 2
    await both_answer(it)
    assert await series(it, "replica_starts") == [1.0, 0.0]
    # its cache is empty, and the routing knows it: what it had is read again, and found again
    assert it.service.engines.all[0].engine is not dead
    streams = [await begun(it, [5 + place], max_tokens=1000) for place in range(2)]
    assert held(it) == [1, 1]
    for each in streams:
        each.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await until(lambda: held(it) == [0, 0])


async def only_full_engines_refuse(it: Living) -> list[asyncio.Task[httpx.Response]]:
    """Three answers run and three wait for each engine; the thirteenth is too much."""

    def asked(token: int) -> asyncio.Task[httpx.Response]:
        body = {"prompt": [token], "max_tokens": 8000, "ignore_eos": True}
        return asyncio.create_task(it.client.post("/v1/completions", json=body))

    running = [asked(7 + place) for place in range(6)]
    await until(lambda: held(it) == [3, 3] and it.service.admission.waiting == 0)
    waiting = [asked(17 + place) for place in range(6)]
    await until(lambda: it.service.admission.waiting == 6)
    assert held(it) == [6, 6]
    refused = await it.client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert "6 answers wait, as many as may" in refused.json()["error"]["message"]
    # room in one of them is room
    waiting.pop().cancel()
    await until(lambda: it.service.admission.waiting == 5)
    taken = asked(40)
    await until(lambda: sum(held(it)) == 12)
    return [*running, *waiting, taken]


async def an_end_drains(it: Living, asked: list[asyncio.Task[httpx.Response]]) -> None:
    processes = [each.engine.process.pid for each in it.service.engines.all]
    os.kill(os.getpid(), signal.SIGTERM)
    for answer in await asyncio.gather(*asked):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert await it.life == 0
    assert not any(psutil.pid_exists(each) for each in processes)


def test_two_replicas(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(replica, "PAUSES_S", (0.1, 0.1, 0.1))

    async def test() -> None:
        engine = {"max_num_seqs": 3, "num_blocks": 2048}
        async with living(folder, replicas=2, max_waiting=3, drain_s=0.5, engine=engine) as it:
            await both_answer(it)
            await prompts_find_their_blocks(it)
            await a_dead_engine_takes_its_own_along(it)
            await an_end_drains(it, await only_full_engines_refuse(it))

    asyncio.run(asyncio.wait_for(test(), 3 * PATIENCE_S))


def test_a_wrong_setting_ends_a_server_of_replicas(tmp_path: Path) -> None:
    async def test() -> None:
        async with living(tmp_path / "none", ready=False, replicas=2) as it:
            assert await it.life == 2
            assert "is not a folder" in it.service.engines.failed.detail

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
