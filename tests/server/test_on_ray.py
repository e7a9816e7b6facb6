"""Replicas on a Ray cluster of this machine: the same API, prefixes that meet, dropped streams, an engine that is killed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import psutil
import pytest

from rooftile.errors import InvalidInput
from rooftile.server.engine.messages import Add, Failed, StepNews
from rooftile.server.on_ray import app
from rooftile.server.on_ray.application import check_room, settings_of
from rooftile.server.on_ray.engine import Engine, read, read_facts
from tests.server.living import ENGINE

ROOT = Path(__file__).resolve().parents[2]
HAS_RAY = importlib.util.find_spec("ray") is not None
PATIENCE_S = 120.0
STREAM = {"prompt": "The roof", "max_tokens": 1500, "ignore_eos": True, "stream": True}
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed; pip install 'ray[serve]' runs these tests")


def test_a_cluster_without_room_is_a_sentence() -> None:
    check_room(2, 2, {"GPU": 4.0}, on_cpu=False)
    with pytest.raises(InvalidInput, match=r"^2 replicas of 2 GPUs ask for 4; the cluster has 3$"):
        check_room(2, 2, {"GPU": 3.0}, on_cpu=False)
    with pytest.raises(InvalidInput, match=r"^3 replicas of 1 CPU ask for 3; the cluster has 2$"):
        check_room(3, 1, {"CPU": 2.0}, on_cpu=True)


def test_options_are_those_of_the_server_and_of_the_engine() -> None:
    made = settings_of({"model": "a/tiny", "max_waiting": 5, "block_size": 32, "replicas": 3})
    assert (made.max_waiting, made.engine, made.replicas) == (5, {"block_size": 32}, 3)
    with pytest.raises(InvalidInput, match="app has no option 'blocksize'"):
        settings_of({"model": "m", "blocksize": 32})
    with pytest.raises(InvalidInput, match="tensor_parallel_size is 0"):
        settings_of({"model": "m", "tensor_parallel_size": 0})


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_missing_ray_is_a_sentence() -> None:
    with pytest.raises(InvalidInput, match=r"a cluster needs Ray \(ray is missing\); pip install 'ray\[serve\]'"):
        app("m")


def test_the_engine_of_a_deployment_ends_what_has_no_reader(folder: Path) -> None:
    """Its ingress may have died, or Ray may have lost the word that a client has left."""

    async def asked(engine: Engine, name: str, params: dict[str, Any], *, kept: bool = True) -> list[Any]:
        order = msgspec.msgpack.encode(Add(0, [5, 6, 7], params))
        return [read(data) async for data in engine.answer(order, name, kept=kept, blocks=[], size=16, load=0)]

    async def test() -> None:
        engine = Engine.__new__(Engine)
        await engine.__init__({"model": str(folder)} | ENGINE, 2.0)
        try:
            assert read_facts(await engine.facts()).block_size == 16
            whole = await asked(engine, "a", {"max_tokens": 3, "ignore_eos": True})
            assert whole[0].taken == [0]
            assert whole[1].started == [0]
            assert whole[-1].news[0].finished
            (refused,) = await asked(engine, "b", {"max_tokens": 3, "bad": 1})
            assert "bad" in refused.refused[0].reason
            # a call that is spoken of goes on for longer than one that is not
            long = {"max_tokens": 8000, "ignore_eos": True}
            read_on = asyncio.create_task(asked(engine, "read", long))
            unread = asyncio.create_task(asked(engine, "unread", long))
            while not unread.done():
                await engine.keep(["read"])
                await asyncio.sleep(0.1)
            assert isinstance(unread.result()[-1], Failed)
            assert isinstance(unread.result()[-2], StepNews)
            assert not read_on.done() or not isinstance(read_on.result()[-1], Failed)
            read_on.cancel()
            await asyncio.gather(read_on, return_exceptions=True)
            assert engine._engine.requests == 0
            await engine.check_health()
            engine._engine.kill()
            await engine._engine.over.wait()
            with pytest.raises(RuntimeError, match=r"by signal 9|connection to the engine has failed"):
                await engine.check_health()
        finally:
            engine._watch.cancel()
            await engine._engine.close()

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


class OnRay:
    """A server on a cluster of its own, with a home folder of its own: Ray writes a token there."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.port, self.log = free_port(), home / "log"
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {"HOME": str(home), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.server.ray_server", str(folder), str(self.port)], cwd=ROOT, stdout=log,
                stderr=log, env=os.environ | env, start_new_session=True,
            )  # fmt: skip
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S, trust_env=False)
        self.until(lambda: "ready: http" in self.log.read_text())
        self.until(lambda: self.client.get("/health").json()["replicas"] == ["ready", "ready"])

    def until(self, holds: Callable[[], bool]) -> None:
        """Returns when a condition holds."""
        until = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < until, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.2)

    def metric(self, name: str, label: str = "") -> float:
        text = self.client.get("/metrics").text
        return sum(float(value) for value in re.findall(rf"^rooftile:{name}{{.*{label}.*}} (\S+)$", text, re.MULTILINE))

    def is_idle(self) -> bool:
        return self.metric("num_requests_running") == 0 and self.metric("kv_blocks", 'state="used"') == 0

    def engines(self) -> list[psutil.Process]:
        """The engines' processes."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in children if "rooftile.server.engine.process" in each.cmdline()]

    def close(self) -> None:
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(PATIENCE_S) == 0, self.log.read_text()
        finally:
            self.client.close()
            _, left = psutil.wait_procs(children, 20)
            for each in left:
                each.kill()
            if self.process.poll() is None:
                self.process.kill()
        assert not left, [each.cmdline() for each in left]


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    made = OnRay(folder, tmp_path_factory.mktemp("home"))
    try:
        yield made
    finally:
        made.close()


@needs_ray
def test_the_client_of_openai_is_answered(cluster: OnRay) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{cluster.port}/v1", api_key="any") as client:
        whole = client.completions.create(model="tiny", prompt="The roof", max_tokens=8, temperature=0)
        parts = client.completions.create(model="tiny", prompt="The roof", max_tokens=8, temperature=0, stream=True)
        assert "".join(each.choices[0].text for each in parts) == whole.choices[0].text != ""
        with pytest.raises(openai.BadRequestError, match="max_tokens is -1"):
            client.completions.create(model="tiny", prompt="a", max_tokens=-1)


@needs_ray
def test_prompts_find_their_blocks(cluster: OnRay) -> None:
    def cached(prompt: list[int]) -> int:
        answer = cluster.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    families = [[3 + family] * 192 for family in range(6)]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(cached, families)) == [0] * 6
    for more in range(2):
        assert [cached([*family, 20 + more]) for family in families] == [192] * 6
    cluster.until(lambda: cluster.metric("prefix_cache_hits_total") >= 12 * 192)
    hits = [cluster.metric("replica_prefix_cache_hits_total", f'replica="{number}"') for number in (1, 2)]
    assert min(hits) > 0, "one engine alone has answered"


@needs_ray
def test_dropped_streams_leave_nothing_and_full_engines_refuse(cluster: OnRay) -> None:
    refused = []

    def drop(_: int) -> None:
        while True:
            with cluster.client.stream("POST", "/v1/completions", json=STREAM) as answer:
                if answer.status_code == 200:
                    next(answer.iter_lines())
                    return
                refused.append(answer.status_code)
            time.sleep(0.2)

    # eight run and sixteen wait, so that some of them are too many
    with ThreadPoolExecutor(40) as threads:
        list(threads.map(drop, range(100)))
    assert set(refused) <= {429}
    cluster.until(cluster.is_idle)
    assert cluster.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


@needs_ray
def test_a_killed_engine_takes_its_own_along_and_comes_back(cluster: OnRay) -> None:
    before = cluster.engines()
    assert len(before) == 2
    begun = threading.Barrier(5)

    def last_event(_: int) -> str:
        with cluster.client.stream("POST", "/v1/completions", json=STREAM) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            begun.wait(PATIENCE_S)
            return list(lines)[-2]

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(last_event, each) for each in range(4)]
        begun.wait(PATIENCE_S)
        before[0].kill()
        ends = [each.result() for each in asked]
    assert ["engine_down" in each for each in ends].count(True) == 2, ends
    assert ['"finish_reason":"length"' in each for each in ends].count(True) == 2, ends
    assert cluster.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    cluster.until(lambda: len(cluster.engines()) == 2 and before[0].pid not in [each.pid for each in cluster.engines()])
    cluster.until(lambda: cluster.client.get("/health").json()["replicas"] == ["ready", "ready"])
