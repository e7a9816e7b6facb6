"""Measures the bars of the server: what HTTP costs beside the engine alone, on one machine in one run. A row for each bar.

    PYTHONPATH=. python -m rooftile_lab.programs.server --device cpu --scale 0.1 --json benchmarks/results/cpu-server.jsonl
    PYTHONPATH=. python -m rooftile_lab.programs.server --device cuda --shape 1b --json server.jsonl

throughput    output tokens per second of W1, all streaming, beside the engine's own driver
first-token   seconds to the first token of one request on an idle server, beside the engine
lag           the event loop's lag, and what running streams lose, while others send large bodies, long texts and hostile schemas
constrained   64 running answers, 8 of them with a grammar: the time between tokens of both kinds beside 64 without
start         seconds from the command to listening, and of --help

On a CPU the engine has one thread, in this process and in the server's: the server's other process needs the second core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rooftile.cost.session import Session
from rooftile.engine import LLM, SamplingParams
from rooftile_lab.bench import workloads
from rooftile_lab.bench.driver import drive, fitted
from rooftile_lab.bench.measures import measures
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import measured
from rooftile_lab.programs.served import (
    ROOT,
    Reading,
    Server,
    arguments,
    environment,
    get,
    opened,
    read_all,
    show,
    stream_of,
)

# 64 answers run at once in the bar on constrained ones
RUNNING, CONSTRAINED = 64, 8
# the streams of the bar on lag, and their tokens
STREAMS, TOKENS = 16, 256
ROOM = ["--max-waiting", "100000", "--max-waiting-tokens", "100000000", "--deadline", "3600"]
HOSTILE = {
    "type": "object",
    "properties": {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n % 7},9}}$"} for n in range(1300)},
}  # fmt: skip


class Bench:
    """One run of all bars.

    Args:
        asked: the command's arguments.
        session: the machine.
        folder: the checkpoint.
    """

    def __init__(self, asked: argparse.Namespace, session: Session, folder: Path) -> None:
        self.asked, self.session, self.folder = asked, session, folder
        self.options = [
            "--device", asked.device, "--num-blocks", str(asked.num_blocks), "--max-model-len", str(asked.max_model_len), *ROOM,
        ]  # fmt: skip

    def engine(self) -> LLM:
        """Returns the engine that the server runs."""
        asked = self.asked
        return LLM(self.folder, device=asked.device, num_blocks=asked.num_blocks, max_model_len=asked.max_model_len)

    def row(self, case: str, taken: dict[str, Sequence[float]], **settings: Any) -> Row:
        """Returns the row of a bar."""
        size = {"model": self.asked.shape, "num_blocks": self.asked.num_blocks, "threads": torch.get_num_threads()}
        return Row(
            **self.session.about(self.session.dtype), suite="server", case=f"{case}-{self.asked.shape}", backend="http",
            phase="serve", samples=max(map(len, taken.values())), settings=size | settings, **measured(taken),
        )  # fmt: skip

    def throughput(self) -> Row:
        (workload,) = workloads.named(["W1"], factor=self.asked.scale)
        llm = self.engine()
        workload = replace(workload, requests=fitted(workload, llm.engine.runner.decoder.config.vocab_size))
        bodies = [
            stream_of(ask.prompt, ask.params.max_tokens or 0, temperature=ask.params.temperature) for ask in workload.requests
        ]
        offline, http = [], []
        cores: dict[str, list[float]] = {}
        with Server(self.folder, *self.options) as server:
            # each compiles and fills what it needs once
            drive(llm.engine, workload)
            asyncio.run(read_all(server.port, bodies))
            for _ in range(self.asked.repeats):
                llm.engine.pool.forget_prefixes()
                offline.append(measures(drive(llm.engine, workload)).output_tok_s)
                salt, before = os.urandom(8).hex(), server.cpu_s
                readings = asyncio.run(read_all(server.port, [body | {"cache_salt": salt} for body in bodies]))
                after = server.cpu_s
                seconds = max(each.ended for each in readings) - min(each.sent for each in readings)
                for who in after:
                    cores.setdefault(f"{who}_cores", []).append((after[who] - before[who]) / seconds)
                http.append(sum(each.tokens for each in readings) / seconds)
        ratios = [each / beside for each, beside in zip(http, offline, strict=True)]
        taken = {"http_tok_s": http, "offline_tok_s": offline, "ratio": ratios, "ratio_of_best": [max(http) / max(offline)]}
        return self.row("throughput", taken | cores, workload="W1", scale=self.asked.scale)

    def first_token(self) -> Row:
        llm, rng = self.engine(), random.Random(0)
        vocabulary = llm.engine.runner.decoder.config.vocab_size
        offline, http, refused = [], [], []
        with Server(self.folder, *self.options) as server:
            for turn in range(20 * self.asked.repeats + 4):
                prompt = [rng.randrange(vocabulary) for _ in range(256)]
                began = time.perf_counter()
                request = llm.engine.add(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
                while not request.answers[0].generated:
                    llm.engine.step()
                alone = time.perf_counter() - began
                while not llm.engine.idle:
                    llm.engine.step()
                (reading,) = asyncio.run(read_all(server.port, [stream_of(prompt, 8)]))
                # a refusal costs the client, the socket and the parsing of HTTP, and no engine
                (refusal,) = asyncio.run(read_all(server.port, [stream_of(prompt, 8, n=99)]))
                if turn >= 4:
                    offline.append(1e3 * alone)
                    http.append(1e3 * (reading.times[0] - reading.sent))
                    refused.append(1e3 * (refusal.ended - refusal.sent))
        taken = {
            "http_ttft_ms": http, "offline_ttft_ms": offline, "ratio_of_medians": [median(http) / median(offline)],
            "above_ms": [median(http) - median(offline)], "refusal_ms": refused,
        }  # fmt: skip
        return self.row("first-token", taken, prompt_tokens=256)

    def lag(self) -> Row:
        """Compares the tokens of running streams in two windows: a quiet one, and one with requests that cost much.

        Tokens and not events: those that come while the event loop is busy are joined into one event, and none is lost.
        """
        with Server(self.folder, *self.options) as server:
            taken = asyncio.run(self._lag(server))
        return self.row("lag", taken, streams=STREAMS, tokens=TOKENS, every_s=self.asked.every, seconds=self.asked.window)

    async def _lag(self, server: Server) -> dict[str, Sequence[float]]:
        window, port = self.asked.window, server.port
        begun = 0

        async def go_on(first: int) -> None:
            nonlocal begun
            # answers of every length at any time: a long one takes longer per token, and would make later windows slower
            for tokens in chain([first], repeat(TOKENS)):
                begun += 1
                await Reading(port, stream_of("The roof", tokens)).run()

        running = [asyncio.create_task(go_on(TOKENS * n // STREAMS)) for n in range(1, STREAMS + 1)]
        while begun < 2 * STREAMS:
            await asyncio.sleep(0.1)
        quiet, lost, lags, most, rate = [], [], [], [], []
        cores: dict[str, list[float]] = {}
        for _ in range(self.asked.repeats):
            seen, spent = [await Seen.of(port)], [server.cpu_s]
            await asyncio.sleep(window)
            spent.append(server.cpu_s)
            seen.append(await Seen.of(port))
            answered: list[float] = []
            hostile = [asyncio.create_task(send_often(port, *each, answered, every_s=self.asked.every)) for each in costly()]
            await asyncio.sleep(window)
            spent.append(server.cpu_s)
            seen.append(await Seen.of(port))
            for task in hostile:
                task.cancel()
            await asyncio.gather(*hostile, return_exceptions=True)
            # a grammar that an earlier request began may still be compiling
            await asyncio.sleep(2.0)
            rates = [(after.tokens - before.tokens) / (after.at - before.at) for before, after in pairwise(seen)]
            quiet.append(rates[0])
            lost.append(100 * (1 - rates[1] / rates[0]))
            rate.append(sum(moment < seen[2].at for moment in answered) / window)
            lags.append(1e3 * quantile(seen[1].lags, seen[2].lags, 0.99))
            most.append(1e3 * quantile(seen[1].lags, seen[2].lags, 1.0))
            for when, (first, last) in zip(("quiet", "loaded"), pairwise(spent), strict=True):
                for who in first:
                    cores.setdefault(f"{who}_cores_{when}", []).append((last[who] - first[who]) / window)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return {
            "lag_ms_p99_at_most": lags, "lag_ms_most_at_most": most, "tokens_s": quiet, "lost_percent": lost, "costly_s": rate,
        } | cores  # fmt: skip

    def constrained(self) -> Row:
        tokens = min(256, self.asked.max_model_len - 16)
        free = stream_of("The roof", tokens)
        steered = {key: value for key, value in free.items() if key != "ignore_eos"}
        steered |= {"structured_outputs": {"regex": f"[a-z ]{{{8 * tokens}}}"}}
        taken: dict[str, list[float]] = {name: [] for name in ("free_itl_ms", "others_itl_ms", "constrained_itl_ms")}
        with Server(self.folder, *self.options) as server:
            asyncio.run(read_all(server.port, [free] * (RUNNING - CONSTRAINED) + [steered] * CONSTRAINED))
            for _ in range(self.asked.repeats):
                alone = asyncio.run(read_all(server.port, [free] * RUNNING))
                both = asyncio.run(read_all(server.port, [free] * (RUNNING - CONSTRAINED) + [steered] * CONSTRAINED))
                for name, part in (
                    ("free_itl_ms", alone), ("others_itl_ms", both[:-CONSTRAINED]), ("constrained_itl_ms", both[-CONSTRAINED:]),
                ):  # fmt: skip
                    taken[name].append(1e3 * median(gap for each in part for gap in gaps_of(each)))
        best = {name: min(values) for name, values in taken.items()}
        ratios = {
            "others_over_free": [best["others_itl_ms"] / best["free_itl_ms"]],
            "constrained_over_free": [best["constrained_itl_ms"] / best["free_itl_ms"]],
        }  # fmt: skip
        return self.row("constrained", taken | ratios, running=RUNNING, constrained=CONSTRAINED)

    def start(self) -> Row:
        listening, ready, shown = [], [], []
        for _ in range(self.asked.repeats):
            with Server(self.folder, *self.options) as server:
                listening.append(server.listening_s)
                ready.append(server.ready_s)
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "rooftile", "serve", "--help"], cwd=ROOT, stdout=subprocess.DEVNULL, check=True,
                env=environment(),
            )  # fmt: skip
            shown.append(time.perf_counter() - began)
        return self.row("start", {"listening_s": listening, "ready_s": ready, "help_s": shown})


def costly() -> Iterator[tuple[str, Any]]:
    """Yields a path and a body each: 4 MiB of JSON, a text of 1 MiB, and a schema that takes long to compile."""
    numbers = b"[" + b"7," * (2**21 - 30) + b"7]"
    yield "/v1/completions", b'{"prompt": ' + numbers + b"}"
    # refused when it is tokenised, as it is too long for the model
    yield "/v1/completions", {"prompt": "the roof " * (2**20 // 9)}
    yield "/v1/completions", stream_of("a", 1, ignore_eos=None, structured_outputs={"json": HOSTILE})


async def send_often(port: int, path: str, body: Any, answered: list[float], *, every_s: float) -> None:
    """Sends a request again and again until it is cancelled, and notes when it was answered."""
    while True:
        until = time.perf_counter() + every_s
        # no schema is taken from the cache of those that are compiled
        fresh = body
        if isinstance(body, dict) and "structured_outputs" in body:
            fresh = body | {"structured_outputs": {"json": HOSTILE | {"title": os.urandom(8).hex()}}}
        with contextlib.suppress(ConnectionError):
            await Reading(port, fresh, path).run()
            answered.append(time.perf_counter())
        await asyncio.sleep(max(0.0, until - time.perf_counter()))


@dataclass(frozen=True, slots=True)
class Seen:
    """A server's metrics at a moment.

    Args:
        at: the moment.
        tokens: the tokens of all answers so far.
        lags: how often the event loop's lag was at most each number of seconds.
    """

    at: float
    tokens: float
    lags: dict[float, float]

    @classmethod
    async def of(cls, port: int) -> Seen:
        """Reads the metrics."""
        text, at = (await get(port, "/metrics")).decode(), time.perf_counter()
        (tokens,) = re.findall(r"^rooftile:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
        lags = re.findall(r'^rooftile:loop_lag_seconds_bucket\{le="([^"]+)",.*\} (\S+)$', text, re.MULTILINE)
        return cls(at, float(tokens), {float(le): float(count) for le, count in lags})


def quantile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """Returns the least bound that this share of what came between two moments stays below."""
    counts = {le: after[le] - before[le] for le in after}
    return next(le for le, count in sorted(counts.items()) if count >= share * counts[float("inf")])


def gaps_of(reading: Reading) -> list[float]:
    """Returns the seconds between neighbouring events of a stream; raises RuntimeError if it has less than two."""
    if len(reading.times) < 2:
        raise RuntimeError(f"a stream of {len(reading.times)} events: status {reading.status}, {reading.tail[-600:]!r}")
    return [later - earlier for earlier, later in pairwise(reading.times)]


BARS = {
    "throughput": Bench.throughput, "first-token": Bench.first_token, "lag": Bench.lag, "constrained": Bench.constrained,
    "start": Bench.start,
}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, num_blocks=20_000)
    parser.add_argument("--bar", action="append", choices=BARS, help="several; all without it")
    parser.add_argument("--scale", type=float, default=1.0, help="the share of W1's requests and of their lengths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--window", type=float, default=10.0, help="seconds of each window of the bar lag")
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one costly request of a kind to the next")
    asked = parser.parse_args()
    with opened(asked) as (session, folder):
        bench = Bench(asked, session, folder)
        for name in asked.bar or BARS:
            show(BARS[name](bench), asked.json)


if __name__ == "__main__":
    main()
