"""Sends twice as many requests as the server can answer, for ten minutes.

They come at random, at twice the rate that 64 clients in turn have reached. A fifth of the clients vanish at a random moment, and
one request in a hundred is invalid. The row has what became of them, the waits of those that were answered, and what was left
afterwards: threads, files, connections, memory and blocks. RuntimeError is raised if an answer differs from the offline engine's,
if a request had no end, or if the server died.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from rooftile.engine import SamplingParams
from rooftile_lab.bench.needed import needed
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.server.client import Reading, get, read_all
from rooftile_lab.bench.server.process import Server
from rooftile_lab.bench.server.run import Run

WAITING = 32
# no request may take longer than this
PATIENCE_S = 120.0
INVALID: tuple[dict[str, Any], ...] = ({"n": 17}, {"prompt": [-1]}, {"tempratur": 1}, {"max_tokens": 0}, {"prompt": []})


class Crowd:
    """Clients that come at random.

    Args:
        port: the server's.
        due: the text of each prompt's answer.
        longest: the most tokens of an answer.
        seed: of all that is random.
    """

    def __init__(self, port: int, due: dict[str, str], longest: int, seed: int = 0) -> None:
        self.port, self.due, self.longest = port, due, longest
        self.ends: Counter[str] = Counter()
        self.waits: list[float] = []
        """Seconds to the first token of those that were answered."""
        self._rng = random.Random(seed)

    async def one(self) -> None:
        """Sends a request, and notes its end."""
        rng = self._rng
        prompt = rng.choice(list(self.due))
        wrong = rng.choice(INVALID) if rng.random() < 0.01 else {}
        gone = rng.randrange(self.longest) if rng.random() < 0.2 and not wrong else None
        reading = Reading(self.port, asked(prompt, self.longest) | wrong, gone=gone, kept=1 << 20)
        if gone == 0:
            # before anything has come
            task = asyncio.create_task(reading.run())
            await asyncio.sleep(rng.random() * 0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.ends["gone"] += 1
            return
        try:
            await asyncio.wait_for(reading.run(), PATIENCE_S)
        except TimeoutError:
            self.ends["hung"] += 1
            return
        self._note(reading, prompt, wrong, gone)

    def _note(self, reading: Reading, prompt: str, wrong: Any, gone: int | None) -> None:
        if reading.status == 200 and not wrong:
            if b"data: [DONE]" in reading.tail:
                parts = re.findall(r'"text":("(?:[^"\\]|\\.)*")', reading.tail.decode())
                text = "".join(map(json.loads, parts))
                if text != self.due[prompt]:
                    raise RuntimeError(f"{prompt!r} was answered with {text!r}; due is {self.due[prompt]!r}")
                self.ends["answered"] += 1
                self.waits.append(1e3 * (reading.times[0] - reading.sent))
            else:
                self.ends["gone" if gone is not None else "cut"] += 1
        else:
            self.ends[str(reading.status)] += 1

    async def come(self, rate: float, seconds: float) -> None:
        """Lets clients come at this rate, for so long; returns when all have gone."""
        tasks, until = [], time.perf_counter() + seconds
        moment = time.perf_counter()
        while moment < until:
            moment += self._rng.expovariate(rate)
            await asyncio.sleep(max(0.0, moment - time.perf_counter()))
            tasks.append(asyncio.create_task(self.one()))
        await asyncio.gather(*tasks)


def asked(prompt: str, longest: int) -> dict[str, Any]:
    """Returns a request whose answer is the same every time."""
    return {"prompt": prompt, "max_tokens": longest, "temperature": 0, "ignore_eos": True, "stream": True}


async def capacity(port: int, prompts: Sequence[str], longest: int, seconds: float) -> float:
    """Returns the requests per second that 64 clients reach, each with one request at a time."""
    done, until = 0, time.perf_counter() + seconds

    async def client(n: int) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await Reading(port, asked(prompts[n % len(prompts)], longest)).run()
            done += 1
            n += 1

    began = time.perf_counter()
    await asyncio.gather(*(client(n) for n in range(64)))
    return done / (time.perf_counter() - began)


def held(server: Server) -> dict[str, float]:
    """Returns what the two processes hold."""
    psutil = needed("server", "psutil")
    found: dict[str, float] = {}
    for name, pid in zip(("api", "engine"), server.pids, strict=True):
        process = psutil.Process(pid)
        found |= {f"{name}_threads": process.num_threads(), f"{name}_files": process.num_fds()}
        found[f"{name}_rss_mb"] = process.memory_info().rss / 1e6
    return found


async def idle(port: int) -> None:
    """Waits until no block is used; fails if that takes a minute."""
    until = time.perf_counter() + 60
    while time.perf_counter() < until:
        text = (await get(port, "/metrics")).decode()
        held = re.findall(r'^rooftile:(?:kv_blocks\{.*state="used"\}|num_requests_running\{.*\}) (\S+)$', text, re.MULTILINE)
        if held == ["0.0", "0.0"]:
            return
        await asyncio.sleep(0.1)
    raise RuntimeError("blocks are still used a minute after the last client")


def overload(run: Run) -> Row:
    """Measures one overload."""
    options = run.options
    prompts = [f"The roof has {n} tiles, " for n in range(64)]
    sizes = {"num_blocks": options.num_blocks or 4000, "max_model_len": 1024}
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    outputs = run.engine(**sizes).generate(prompts, params)
    due = {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}
    with run.server("--max-waiting", str(WAITING), "--max-num-seqs", "64", **sizes) as server:
        asyncio.run(read_all(server.port, [asked(prompt, options.tokens) for prompt in prompts[:WAITING]]))
        rate = asyncio.run(capacity(server.port, prompts, options.tokens, min(10.0, options.overload_s)))
        asyncio.run(idle(server.port))
        before, crowd = held(server), Crowd(server.port, due, options.tokens)
        asyncio.run(crowd.come(2 * rate, options.overload_s))
        asyncio.run(idle(server.port))
        after = held(server)
        # an idle engine checks its books after a second, and would have died of a leak
        time.sleep(1.5)
        asyncio.run(read_all(server.port, [asked(prompts[0], options.tokens)]))
    grown = {f"grown_{name}": after[name] - before[name] for name in before}
    settings = {"model": options.model, "seconds": options.overload_s, "max_waiting": WAITING, "running": 64}
    return run.once("overload", measures_of(crowd, rate, options.overload_s) | grown, settings)


def measures_of(crowd: Crowd, rate: float, seconds: float) -> dict[str, float]:
    """Returns what became of the requests; raises RuntimeError if some had another end than they may have."""
    names = {"answered": "answered", "gone": "gone", "429": "refused", "400": "invalid"}
    bad = {end: count for end, count in crowd.ends.items() if end not in names}
    if bad:
        raise RuntimeError(f"some requests had another end: {bad}")
    return {f"{names[end]}_requests": float(count) for end, count in crowd.ends.items()} | {
        "capacity_requests_s": rate, "answered_requests_s": crowd.ends["answered"] / seconds,
        "ttft_ms_p50": median(crowd.waits), "ttft_ms_p99": float(np.percentile(crowd.waits, 99)),
    }  # fmt: skip
