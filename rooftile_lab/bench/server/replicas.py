"""Two replicas beside one, and the routing of prompts beside a choice at random."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean
from typing import Any

from rooftile_lab.bench import workloads
from rooftile_lab.bench.driver import fitted
from rooftile_lab.bench.models import MODELS
from rooftile_lab.bench.processes import environment
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.server.bars import ROOM
from rooftile_lab.bench.server.client import Reading, get, stream_of
from rooftile_lab.bench.server.process import Server
from rooftile_lab.bench.server.run import Run

# the number of beginnings that prompts share, of requests for each, and of clients
BEGINNINGS, PREFIX, OFTEN, CLIENTS = 64, 2048, 2, 8
# the number of times that servers are chosen at random
CHOICES = 3
READY_S = 300.0


def replicas(run: Run) -> Row:
    """Compares two replicas with one in requests per second, and their cached tokens with two servers chosen at random."""
    (workload,) = workloads.named(["W1"], factor=run.options.scale)
    asked = fitted(workload, MODELS[run.options.model].vocab_size)
    bodies = [stream_of(ask.prompt, ask.params.max_tokens or 0, temperature=ask.params.temperature) for ask in asked] * 2
    prompts = shared_prefixes(MODELS[run.options.model].vocab_size, max(16, int(PREFIX * run.options.scale)))
    with ExitStack() as servers:
        two = servers.enter_context(started(run, 2, "0,1"))
        taken = {"two_req_s": rates(run, two.port, bodies)}
        routed = asyncio.run(cached(prompts, lambda _: two.port))
    with ExitStack() as servers:
        alone = [servers.enter_context(started(run, 1, gpu)) for gpu in "01"]
        taken["one_req_s"] = rates(run, alone[0].port, bodies)
        # chance may favour one choice: the mean of several, none of which finds the blocks of another
        rng, ports = random.Random(0), [server.port for server in alone]
        at_random = fmean(asyncio.run(cached(prompts, lambda _: rng.choice(ports), f"choice-{n}")) for n in range(CHOICES))
    taken["rate_ratio"] = [both / one for both, one in zip(taken["two_req_s"], taken["one_req_s"], strict=True)]
    made = run.bar("replicas", taken, workload="W1 twice", scale=run.options.scale, prefixes=BEGINNINGS, prefix=PREFIX)
    found = {"cached_tokens": routed, "cached_tokens_at_random": at_random, "cached_ratio": routed / max(1.0, at_random)}
    return replace(made, measures=made.measures | found)


def started(run: Run, count: int, gpus: str) -> Server:
    """Returns a server with replicas on these GPUs, all of which answer."""
    device = run.session.device.type
    words = [word for name, size in run.sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    env = environment(OMP_NUM_THREADS="1") if device == "cpu" else environment(CUDA_VISIBLE_DEVICES=gpus)
    server = Server(run.folder, "--device", device, "--replicas", str(count), *ROOM, *words, env=env)
    until = time.monotonic() + READY_S
    while json.loads(asyncio.run(get(server.port, "/health")))["replicas"] != ["ready"] * count:
        if time.monotonic() > until:
            raise RuntimeError(f"{count} replicas have not been ready in {READY_S:g} s")
        time.sleep(0.2)
    return server


def rates(run: Run, port: int, bodies: Sequence[dict[str, Any]]) -> list[float]:
    """Returns the requests per second of each run, after a first one; no run finds the prefixes of another."""

    async def once(salt: str) -> float:
        readings = await asyncio.gather(*(Reading(port, body | {"cache_salt": salt}).run() for body in bodies))
        if any(each.status != 200 for each in readings):
            raise RuntimeError(f"a request was answered with {max(each.status for each in readings)}")
        return len(readings) / (max(each.ended for each in readings) - min(each.sent for each in readings))

    return [asyncio.run(once(f"run-{turn}")) for turn in range(run.options.runs + 1)][1:]


def shared_prefixes(vocabulary: int, length: int) -> list[list[int]]:
    """Returns prompts: each beginning with several ends, in a random order."""
    rng = random.Random(0)
    beginnings = [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(BEGINNINGS)]
    found = [[*beginning, *(rng.randrange(vocabulary) for _ in range(32))] for beginning in beginnings for _ in range(OFTEN)]
    rng.shuffle(found)
    return found


async def cached(prompts: Sequence[list[int]], port_of: Callable[[list[int]], int], salt: str = "") -> int:
    """Returns the tokens of prompts that the servers had, asked by a few clients."""
    left, found = list(prompts), 0

    async def client() -> None:
        nonlocal found
        while left:
            prompt = left.pop()
            reading = await Reading(port_of(prompt), stream_of(prompt, 8) | ({"cache_salt": salt} if salt else {})).run()
            found += reading.cached

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return found
