"""Replicas on a Ray cluster of two nodes of this machine: prefixes, dropped streams, ranks on both nodes, what is killed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import psutil
import pytest

from rooftile import __version__
from rooftile.errors import InvalidInput
from rooftile.server.engine.messages import FAILED, Add, Failed, StepNews
from rooftile.server.on_ray import app, nodes
from rooftile.server.on_ray.application import settings_of
from rooftile.server.on_ray.command import reason_of
from rooftile.server.on_ray.engine import Engine, read, read_facts
from rooftile.server.on_ray.nodes import STRATEGIES, check_rooftile, check_room
from rooftile.server.on_ray.ranks import Rank, RankOrder
from tests.server.living import ENGINE

ROOT = Path(__file__).resolve().parents[2]
HAS_RAY = importlib.util.find_spec("ray") is not None
PATIENCE_S = 240.0
STREAM = {"prompt": "The roof", "max_tokens": 1500, "ignore_eos": True, "stream": True}
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed; pip install 'ray[serve]' runs these tests")


def test_a_cluster_without_room_is_a_sentence() -> None:
    three, four = [{"GPU": 2.0, "CPU": 9.0}, {"GPU": 1.0}, {"CPU": 9.0}], [{"GPU": 3.0}, {"GPU": 1.0}]
    check_room(2, 2, [{"GPU": 4.0}], on_cpu=False)
    check_room(2, 2, [{"GPU": 2.0}] * 2, on_cpu=False)
    for strategy in STRATEGIES:
        with pytest.raises(InvalidInput, match=r"^2 replicas of 2 GPUs ask for 4; the cluster has 3$"):
            check_room(2, 2, three, on_cpu=False, strategy=strategy)
    with pytest.raises(InvalidInput, match=r"^3 replicas of 1 CPU ask for 3; the cluster has 2$"):
        check_room(3, 1, [{"CPU": 2.0}], on_cpu=True)
    # there are enough, and not where they are asked for
    check_room(2, 2, four, on_cpu=False, strategy="SPREAD")
    check_room(1, 2, four, on_cpu=False, strategy="STRICT_SPREAD")
    for strategy, place in (("STRICT_PACK", "one node"), ("STRICT_SPREAD", "2 nodes")):
        due = rf"^2 replicas of 2 GPUs on {place} each \({strategy}\) do not fit; the nodes have 3, 1$"
        with pytest.raises(InvalidInput, match=due):
            check_room(2, 2, four, on_cpu=False, strategy=strategy)


def test_options_are_those_of_the_server_and_of_the_engine() -> None:
    made = settings_of({"model": "a/tiny", "max_waiting": 5, "block_size": 32, "replicas": 3})
    assert (made.max_waiting, made.engine, made.replicas) == (5, {"block_size": 32}, 3)
    with pytest.raises(InvalidInput, match="app has no option 'blocksize'"):
        settings_of({"model": "m", "blocksize": 32})
    with pytest.raises(InvalidInput, match="tensor_parallel_size is 0"):
        settings_of({"model": "m", "tensor_parallel_size": 0})


def test_the_reason_is_the_end_of_a_traceback() -> None:
    """Ray itself says "Failed to update the deployments ['Engine']"."""
    assert reason_of("It failed. Error:\n  File 'a.py'\nrooftile.errors.InvalidInput: m is 0: make it 1\n") == "m is 0: make it 1"
    assert reason_of("no room for it") == "no room for it"


def test_what_an_application_refuses() -> None:
    with pytest.raises(InvalidInput, match="replicas is 3, and autoscaling_config says how many there are; leave one"):
        app("m", replicas=3, autoscaling_config={})
    with pytest.raises(InvalidInput, match=r"placement_group_strategy is 'TIGHT'; must be one of STRICT_PACK, PACK, SPREAD"):
        app("m", placement_group_strategy="TIGHT")


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scaling_without_an_engine_or_without_sense_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"autoscaling_config has min_replicas 0; must be at least 1"):
        app("m", autoscaling_config={"min_replicas": 0, "max_replicas": 2})
    with pytest.raises(InvalidInput, match=r"autoscaling_config is not as Ray wants it: .*max_replicas"):
        app("m", autoscaling_config={"min_replicas": 3, "max_replicas": 2})


def test_nodes_with_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "node_address", lambda: "10.0.0.2")
    check_rooftile(__version__)
    due = rf"^rooftile is {__version__} on the node 10.0.0.2, and 9.9 where the application was made; install the same on all"
    with pytest.raises(InvalidInput, match=due):
        check_rooftile("9.9")
    with pytest.raises(InvalidInput, match=due):
        asyncio.run(Engine.__new__(Engine).__init__({}, 2.0, "9.9"))
    order = RankOrder({"tensor_parallel_size": 2}, "127.0.0.1", 1, __version__, "1.13")
    due = r"^torch is \S+ on the node 10.0.0.2, and 1.13 on rank 0's node; install the same on all nodes$"
    assert re.match(due, Rank().run(order, 1))
    # a node without the model's folder is no reason to try again either
    assert "/nowhere" in Rank().run(
        order._replace(settings=order.settings | {"model": "/nowhere"}, torch=nodes.torch_version()), 1
    )


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_missing_ray_is_a_sentence() -> None:
    with pytest.raises(InvalidInput, match=r"a cluster needs Ray \(ray is missing\); pip install 'ray\[serve\]'"):
        app("m")


def test_the_engine_of_a_deployment_ends_what_has_no_reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ingress may have died, or Ray may have lost the word that a client has left."""
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)

    async def asked(engine: Engine, name: str, params: dict[str, Any], *, kept: bool = True) -> list[Any]:
        order = msgspec.msgpack.encode(Add(0, [5, 6, 7], params))
        return [read(data) async for data in engine.answer(order, name, kept=kept, blocks=[], size=16, load=0)]

    async def test() -> None:
        engine = Engine.__new__(Engine)
        await engine.__init__({"model": str(folder)} | ENGINE, 2.0, __version__)
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
            # its load is 0, so it would draw requests until Ray has looked
            while not left:
                await asyncio.sleep(0.05)
            assert left == [FAILED]
            with pytest.raises(RuntimeError, match=r"by signal 9|connection to the engine has failed"):
                await engine.check_health()
        finally:
            for task in engine._tasks:
                task.cancel()
            await engine._engine.close()

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


class OnRay:
    """A server on a cluster of its own, with a home folder of its own: Ray writes a token there."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.port, self.home, self.log = free_port(), home, home / "log"
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {"HOME": str(home), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.server.ray_server", str(folder), str(self.port)], cwd=ROOT, stdout=log,
                stderr=log, env=os.environ | env, start_new_session=True,
            )  # fmt: skip
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S, trust_env=False)
        self.until(lambda: "ready: http" in self.log.read_text())
        self.until(lambda: self.states() == ["ready", "ready"])

    def until(self, holds: Callable[[], bool]) -> None:
        """Returns when a condition holds."""
        until = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < until, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.2)

    def states(self, place: str = "") -> list[str]:
        """The states of an application's engines."""
        answer = self.client.get(f"{place}/health")
        return answer.json()["replicas"] if answer.status_code == 200 else []

    def metric(self, name: str, label: str = "", place: str = "") -> float:
        text = self.client.get(f"{place}/metrics").text
        return sum(float(value) for value in re.findall(rf"^rooftile:{name}{{.*{label}.*}} (\S+)$", text, re.MULTILINE))

    def is_idle(self, place: str = "") -> bool:
        return self.metric("num_requests_running", "", place) == 0 == self.metric("kv_blocks", 'state="used"', place)

    def processes(self, *words: str) -> list[psutil.Process]:
        """The processes below the server whose command has one of these words."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in children if any(word in " ".join(each.cmdline()) for word in words)]

    def replicas(self, application: str) -> list[psutil.Process]:
        """The processes of the replicas of an application's engine."""
        return self.processes(f"ray::ServeReplica:{application}:Engine")

    def engines(self, application: str) -> list[psutil.Process]:
        """The processes of an application's engines, which are ranks 0."""
        found = [child for each in self.replicas(application) for child in each.children()]
        return [each for each in found if "rooftile.server.engine.process" in each.cmdline()]

    def groups(self) -> dict[str, list[str]]:
        """The placement groups that there are, and the nodes of each."""
        before = self.log.read_text().count("\ngroups ")
        self.process.send_signal(signal.SIGUSR1)
        self.until(lambda: self.log.read_text().count("\ngroups ") > before)
        return self.last_groups()

    def last_groups(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = json.loads(re.findall("^groups (.*)$", self.log.read_text(), re.MULTILINE)[-1])
        return found

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
        assert self.last_groups() == {}
        files = [str(each.relative_to(self.home)) for each in self.home.rglob("*") if each.is_file()]
        assert set(files) <= {"log", ".ray/auth_token"}, files


def node_of(process: psutil.Process) -> int:
    """Returns the process id of a node's raylet, which has started a worker."""
    return next(each.pid for each in process.parents() if "raylet" in each.name())


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
        list(threads.map(drop, range(200)))
    assert set(refused) <= {429}
    cluster.until(cluster.is_idle)
    assert cluster.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def last_events(cluster: OnRay, place: str, count: int, meanwhile: Callable[[list[Future[str]]], None]) -> list[str]:
    """Returns the last event of each of some streams, during which something happens; each begins after the one before."""

    def last_event(begun: threading.Event) -> str:
        with cluster.client.stream("POST", f"{place}/v1/completions", json=STREAM) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            begun.set()
            return list(lines)[-2]

    with ThreadPoolExecutor(count) as threads:
        asked = []
        for _ in range(count):
            begun = threading.Event()
            asked.append(threads.submit(last_event, begun))
            assert begun.wait(PATIENCE_S)
        meanwhile(asked)
        return [each.result() for each in asked]


@needs_ray
def test_a_killed_engine_takes_its_own_along_and_comes_back(cluster: OnRay) -> None:
    before = cluster.engines("rooftile")
    assert len(before) == 2
    assert len({node_of(each) for each in before}) == 2, "both replicas are on one node"
    ends = last_events(cluster, "", 4, lambda _: before[0].kill())
    assert ["engine_down" in each for each in ends].count(True) == 2, ends
    assert ['"finish_reason":"length"' in each for each in ends].count(True) == 2, ends
    assert cluster.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    cluster.until(lambda: len(cluster.engines("rooftile")) == 2 and before[0] not in cluster.engines("rooftile"))
    cluster.until(lambda: cluster.states() == ["ready", "ready"])


@needs_ray
def test_ranks_on_two_nodes_answer_like_one(cluster: OnRay) -> None:
    cluster.until(lambda: cluster.states("/split") == ["ready"])
    ask = {"prompt": "The roof", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    one, two = (cluster.client.post(f"{place}/v1/completions", json=ask).json()["choices"][0] for place in ("", "/split"))
    assert two["text"] == one["text"]
    assert two["logprobs"]["token_logprobs"] == pytest.approx(one["logprobs"]["token_logprobs"], abs=1e-4)
    (group,), (engine,), (rank,) = cluster.groups().values(), cluster.engines("split"), cluster.processes("ray::Rank")
    assert len(set(group)) == 2
    assert node_of(engine) != node_of(rank)


@needs_ray
def test_load_starts_ranks_and_what_is_killed_comes_back(cluster: OnRay) -> None:
    """One of two replicas loses its second rank, and the other one its process: Ray starts both anew."""
    cluster.until(lambda: cluster.states("/split") == ["ready"])
    leave = threading.Event()

    def hold(_: int) -> None:
        while not leave.is_set():
            with cluster.client.stream("POST", "/split/v1/completions", json=STREAM) as answer:
                for _ in answer.iter_lines():
                    if leave.is_set():
                        return

    with ThreadPoolExecutor(6) as threads:
        held = [threads.submit(hold, each) for each in range(6)]
        try:
            cluster.until(lambda: len(cluster.groups()) == 2 and cluster.states("/split") == ["ready", "ready"])
        finally:
            leave.set()
        for each in held:
            each.result()
    cluster.until(lambda: cluster.is_idle("/split"))
    before, ranks, replicas = cluster.groups(), cluster.processes("ray::Rank"), cluster.replicas("split")
    assert len(ranks) == len(replicas) == 2

    def kill(asked: list[Future[str]]) -> None:
        engines = cluster.engines("split")
        ranks[0].kill()
        cluster.until(lambda: sum(each.done() for each in asked) == 2)
        # the other rank's replica is the one that still has its engine
        (engine,) = [each for each in engines if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        engine.parent().kill()

    ends = last_events(cluster, "/split", 4, kill)
    assert [bool(re.search(r"rank 1 of 2 has ended \(its actor on \S+ has died\)", each)) for each in ends].count(True) == 2, ends
    assert ["the replica that had the request has ended" in each for each in ends].count(True) == 2, ends
    cluster.until(lambda: len(cluster.groups()) == 2 and not set(cluster.groups()) & set(before))
    cluster.until(lambda: cluster.states("/split") == ["ready", "ready"])
    assert cluster.client.post("/split/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    cluster.until(lambda: len(cluster.processes("ray::Rank")) == 2)
    assert not set(cluster.processes("ray::Rank")) & set(ranks)
