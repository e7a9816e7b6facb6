"""Compares a server with its engine alone: rates, first tokens, answers with a grammar, and starts."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median

from rooftile.engine import SamplingParams
from rooftile_lab.bench import workloads
from rooftile_lab.bench.driver import drive, fitted
from rooftile_lab.bench.measures import measures
from rooftile_lab.bench.processes import ROOT, environment
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.server.client import Reading, read_all, stream_of
from rooftile_lab.bench.server.run import Run

# 64 answers run at once in the bar on constrained ones
RUNNING, CONSTRAINED = 64, 8
# no request is refused because others wait
ROOM = ("--max-waiting", "100000", "--max-waiting-tokens", "100000000", "--deadline", "3600")


def throughput(run: Run) -> Row:
    """Compares output tokens per second of W1, all streaming, with the rate of the engine's own driver."""
    (workload,) = workloads.named(["W1"], factor=run.options.scale)
    llm = run.engine()
    workload = replace(workload, requests=fitted(workload, llm.engine.runner.decoder.config.vocab_size))
    bodies = [stream_of(ask.prompt, ask.params.max_tokens or 0, temperature=ask.params.temperature) for ask in workload.requests]
    offline, http = [], []
    cores: dict[str, list[float]] = {}
    with run.server(*ROOM) as server:
        # each compiles and fills what it needs once
        drive(llm.engine, workload)
        asyncio.run(read_all(server.port, bodies))
        for _ in range(run.options.runs):
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
    return run.bar("throughput", taken | cores, workload="W1", scale=run.options.scale)


def first_token(run: Run) -> Row:
    """Compares the seconds to the first token of one request on an idle server with the engine's."""
    llm, rng = run.engine(), random.Random(0)
    vocabulary = llm.engine.runner.decoder.config.vocab_size
    offline, http, refused = [], [], []
    with run.server(*ROOM) as server:
        for turn in range(20 * run.options.runs + 4):
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
    return run.bar("first-token", taken, prompt_tokens=256)


def constrained(run: Run) -> Row:
    """Compares the time between tokens of 64 running answers, 8 of them with a grammar, with 64 without."""
    tokens = min(256, run.options.max_model_len - 16)
    free = stream_of("The roof", tokens)
    steered = {key: value for key, value in free.items() if key != "ignore_eos"}
    steered |= {"structured_outputs": {"regex": f"[a-z ]{{{8 * tokens}}}"}}
    taken: dict[str, list[float]] = {name: [] for name in ("free_itl_ms", "others_itl_ms", "constrained_itl_ms")}
    with run.server(*ROOM) as server:
        asyncio.run(read_all(server.port, [free] * (RUNNING - CONSTRAINED) + [steered] * CONSTRAINED))
        for _ in range(run.options.runs):
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
    return run.bar("constrained", taken | ratios, running=RUNNING, constrained=CONSTRAINED)


def start(run: Run) -> Row:
    """Times the command until it listens and until it is ready, and its --help."""
    listening, ready, shown = [], [], []
    for _ in range(run.options.runs):
        with run.server(*ROOM) as server:
            listening.append(server.listening_s)
            ready.append(server.ready_s)
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "rooftile", "serve", "--help"], cwd=ROOT, stdout=subprocess.DEVNULL, check=True,
            env=environment(),
        )  # fmt: skip
        shown.append(time.perf_counter() - began)
    return run.bar("start", {"listening_s": listening, "ready_s": ready, "help_s": shown})


def gaps_of(reading: Reading) -> list[float]:
    """Returns the seconds between neighbouring events of a stream; raises RuntimeError if it has less than two."""
    if len(reading.times) < 2:
        raise RuntimeError(f"a stream of {len(reading.times)} events: status {reading.status}, {reading.tail[-600:]!r}")
    return [later - earlier for earlier, later in pairwise(reading.times)]
