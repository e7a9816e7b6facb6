"""Measures the loss of running streams while others send costly requests, and the event loop's lag."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from typing import Any

from rooftile_lab.bench.results import Row
from rooftile_lab.bench.server.bars import ROOM
from rooftile_lab.bench.server.client import Reading, get, stream_of
from rooftile_lab.bench.server.process import Server
from rooftile_lab.bench.server.run import Run

# the streams, and their tokens
STREAMS, TOKENS = 16, 256
HOSTILE = {
    "type": "object",
    "properties": {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n % 7},9}}$"} for n in range(1300)},
}  # fmt: skip


def lag(run: Run) -> Row:
    """Compares the tokens of running streams in two windows: a quiet one, and one with requests that cost much.

    Tokens and not events: those that come while the event loop is busy are joined into one event, and none is lost.
    """
    with run.server(*ROOM) as server:
        taken = asyncio.run(_lag(run, server))
    return run.bar("lag", taken, streams=STREAMS, tokens=TOKENS, every_s=run.options.every_s, seconds=run.options.window_s)


async def _lag(run: Run, server: Server) -> dict[str, Sequence[float]]:
    begun = 0

    async def go_on(first: int) -> None:
        nonlocal begun
        # answers of every length at any time: a long one takes longer per token, and would make later windows slower
        for tokens in chain([first], repeat(TOKENS)):
            begun += 1
            await Reading(server.port, stream_of("The roof", tokens)).run()

    running = [asyncio.create_task(go_on(TOKENS * n // STREAMS)) for n in range(1, STREAMS + 1)]
    while begun < 2 * STREAMS:
        await asyncio.sleep(0.1)
    taken: dict[str, list[float]] = {}
    for _ in range(run.options.runs):
        for name, value in (await _two_windows(run, server)).items():
            taken.setdefault(name, []).append(value)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return dict(taken)


async def _two_windows(run: Run, server: Server) -> dict[str, float]:
    """Returns the measures of a quiet window and of a loaded one after it."""
    window, port = run.options.window_s, server.port
    seen, spent = [await Seen.of(port)], [server.cpu_s]
    await asyncio.sleep(window)
    spent.append(server.cpu_s)
    seen.append(await Seen.of(port))
    answered: list[float] = []
    hostile = [asyncio.create_task(send_often(port, *each, answered, every_s=run.options.every_s)) for each in costly()]
    await asyncio.sleep(window)
    spent.append(server.cpu_s)
    seen.append(await Seen.of(port))
    for task in hostile:
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)
    # a grammar that an earlier request began may still be compiling
    await asyncio.sleep(2.0)
    quiet, loaded = ((after.tokens - before.tokens) / (after.at - before.at) for before, after in pairwise(seen))
    return {
        "lag_ms_p99_at_most": 1e3 * quantile(seen[1].lags, seen[2].lags, 0.99),
        "lag_ms_most_at_most": 1e3 * quantile(seen[1].lags, seen[2].lags, 1.0),
        "tokens_s": quiet, "lost_percent": 100 * (1 - loaded / quiet),
        "costly_s": sum(moment < seen[2].at for moment in answered) / window,
    } | {
        f"{who}_cores_{when}": (last[who] - first[who]) / window
        for when, (first, last) in zip(("quiet", "loaded"), pairwise(spent), strict=True) for who in first
    }  # fmt: skip


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
