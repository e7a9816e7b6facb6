"""Drives workloads over HTTP against any server with OpenAI's API: the rows of `rooftile bench serving --url`.

The numbers are the fields of `measures.Measures`, so that a server and an engine compare line by line. What a client cannot see
(steps, the cache) is left out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from rooftile.cost.session import Session
from rooftile.engine.sampling.params import SamplingParams
from rooftile.errors import InvalidInput
from rooftile_lab.bench.driver import Course, Trace, WallClock, fitted
from rooftile_lab.bench.measures import Measures, measures
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import measured, timed_row
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.serving import case_name, columns
from rooftile_lab.bench.workloads import Workload, WorkloadRequest

# measures that only the engine knows
UNSEEN = (
    "steps", "requests_per_step", "preemptions", "running", "waste_percent", "saved_percent", "host_us_step", "peak_bytes",
)  # fmt: skip
_RENAMED = {"include_stop": "include_stop_str_in_output"}


def measure(
    workloads: Sequence[Workload], session: Session, url: str, *, key: str = "", model: str = "", vocabulary: int = 10_000,
    runs: int = 3, scale: float = 1.0, say: Progress | None = None,
) -> Iterator[Row]:  # fmt: skip
    """Yields a row for each workload.

    Args:
        workloads: as `workloads.named` makes them.
        session: the client's machine.
        url: where the server is, without /v1.
        key: sent as a bearer token.
        model: the model's name; "" for servers that ask for none.
        vocabulary: token ids of prompts are below it.
        runs: how often each is run.
        scale: the workloads' scale, for the rows.
        say: called with a few words before each run.

    Raises:
        InvalidInput: a workload goes on with the tokens of answers, which a client does not know, or httpx is missing.
    """
    say = say or (lambda words: None)
    for workload in workloads:
        if any(ask.after is not None for ask in workload.requests):
            raise InvalidInput(f"{workload.name} goes on with the tokens of its answers, which HTTP does not show")
        workload = replace(workload, requests=fitted(workload, vocabulary))
        found = []
        for run in range(1, runs + 1):
            say(f"{workload.name}, run {run} of {runs}")
            found.append(measures(asyncio.run(drive(workload, url, key, model))))
        yield _row(workload, session, found, url=url, model=model, scale=scale)


async def drive(workload: Workload, url: str, key: str = "", model: str = "") -> Course:
    """Sends a workload's requests at their times, each as a stream of its own."""
    try:
        import httpx
    except ImportError:
        raise InvalidInput("--url needs the package httpx; pip install httpx") from None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    clock = WallClock()
    begun = clock.now()
    traces = [Trace(len(ask.prompt)) for ask in workload.requests]
    limits = httpx.Limits(max_connections=len(traces))
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits, trust_env=False) as client:

        async def one(ask: WorkloadRequest, trace: Trace) -> None:
            await asyncio.sleep(ask.at - (clock.now() - begun))
            trace.arrived = clock.now() - begun
            await _stream(client, ask, trace, model, clock, begun)
            trace.ended = clock.now() - begun

        await asyncio.gather(*map(one, workload.requests, traces))
    return Course(traces, [], clock.now() - begun, 0.0, 0, 0, 0)


async def _stream(client: Any, ask: WorkloadRequest, trace: Trace, model: str, clock: WallClock, begun: float) -> None:
    """Reads one stream, and notes when its tokens come."""
    body = body_of(ask) | ({"model": model} if model else {})
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            trace.fate = "refused"
            return
        tokens = 0
        async for line in answer.aiter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            if "error" in event:
                trace.fate = "refused"
                return
            # a server that counts only at the end is taken to send a token with each piece of text
            said = (event.get("usage") or {}).get("completion_tokens", tokens + len(event.get("choices", ())))
            trace.times += [clock.now() - begun] * (said - tokens)
            tokens = said
            if ask.gone is not None and tokens >= ask.gone:
                trace.fate = "gone"
                return
    trace.fate, trace.lengths = ("answered", [tokens]) if tokens else ("refused", [])


def body_of(ask: WorkloadRequest) -> dict[str, Any]:
    """Returns a request in OpenAI's words, with vLLM's for what OpenAI has not."""
    usual = SamplingParams()
    given = {part.name: getattr(ask.params, part.name) for part in fields(SamplingParams)}
    changed = {_RENAMED.get(name, name): value for name, value in given.items() if value != getattr(usual, name)}
    # a client must not rely on the server's own default
    changed |= {"max_tokens": ask.params.max_tokens, "temperature": ask.params.temperature}
    options = {"include_usage": True, "continuous_usage_stats": True}
    return {"prompt": ask.prompt, "stream": True, "stream_options": options} | changed


def _row(workload: Workload, session: Session, found: list[Measures], *, url: str, model: str, scale: float) -> Row:
    values = {name: each for name, each in columns(found).items() if name not in (*UNSEEN, "seconds")}
    settings: dict[str, Any] = {"url": url, "model": model, "scale": scale, "allocator": "http"}
    return timed_row(
        session, [one.seconds * 1e6 for one in found], dtype=session.dtype, suite="serving",
        case=case_name(workload.name, model or "server", scale, {}), backend="http", phase="serve", problem=workload.purpose,
        settings=settings, **measured(values),
    )  # fmt: skip


def table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Returns the head and the lines of a table of rows."""
    kinds = ("ttft", "itl", "tpot", "e2e")
    head = ("workload", "answered", "refused", "out tok/s", "req/s", *(f"{kind.upper()} ms p50/p99" for kind in kinds))
    return head, [[row.case, *_cells(row.measures, kinds)] for row in rows]


def _cells(found: dict[str, Any], kinds: Sequence[str]) -> Iterator[str]:
    yield from (f"{found[name]:g}" for name in ("requests", "refused"))
    yield from (f"{found[name]:,.4g}" for name in ("output_tok_s", "requests_s"))
    for kind in kinds:
        yield " / ".join(f"{found[name]:,.1f}" if (name := f"{kind}_ms_p{rank}") in found else "-" for rank in (50, 99))
