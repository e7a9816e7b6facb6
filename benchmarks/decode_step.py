"""A step of an engine in which all requests decode: how long it takes, and how long of it the GPU does nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from random import Random
from statistics import mean
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

from rooftile.bench.workloads import IDS, Scale
from rooftile.serve.engine import Engine
from rooftile.serve.sampling.params import SamplingParams


class Sizes(NamedTuple):
    """So many requests, with so many tokens each on average half-way through so many steps."""

    batch: int
    context: int
    steps: int

    @classmethod
    def of(cls, scale: Scale) -> Sizes:
        """256 x 640, 64 steps; or less of it."""
        return cls(scale(256), scale(640), scale(64))

    def __str__(self) -> str:
        return f"{self.batch} x {self.context}"


@contextmanager
def decoding(engine: Engine, sizes: Sizes) -> Iterator[Callable[[], float]]:
    """Requests that all decode for the steps to come, and how many tokens they have on average; afterwards they are gone."""
    length = max(sizes.context - sizes.steps, 1)
    rng, vocabulary = Random(0), min(IDS, engine.runner.decoder.config.vocab_size)
    wanted = SamplingParams(max_tokens=engine.max_len - length, temperature=0.6, ignore_eos=True)
    requests = [engine.add([rng.randrange(vocabulary) for _ in range(length)], wanted) for _ in range(sizes.batch)]
    answers = [request.answers[0] for request in requests]

    def context() -> float:
        return mean(len(answer.ids) for answer in answers)

    try:
        while not all(answer.generated for answer in answers) or context() < sizes.context - sizes.steps / 2:
            engine.step()
        yield context
    finally:
        for request in requests:
            engine.abort(request)
        while not engine.idle:
            engine.step()


def milliseconds(engine: Engine, sizes: Sizes) -> tuple[float, float]:
    """From step to step, and the context half-way.

    On a GPU the engine begins a step before the one before has ended, and so it does here.
    """
    with decoding(engine, sizes) as context:
        first, began = context(), perf_counter()
        for _ in range(sizes.steps):
            engine.step()
        seconds = perf_counter() - began
        return seconds / sizes.steps * 1e3, (first + context()) / 2


def idle(engine: Engine, sizes: Sizes) -> dict[str, Any]:
    """What a GPU does in such steps, by the profiler's account."""
    from torch.profiler import ProfilerActivity, profile

    # else the profiler writes of its own start and stop
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with decoding(engine, sizes):
        # the step in flight is none of those that are counted; after it each is begun while the one before runs
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            for _ in range(sizes.steps):
                engine.step()
            torch.cuda.synchronize()
    events = seen.profiler.kineto_results.events()
    # kernels, copies and fills; what the host did is the CPU's
    intervals = [(event.start_ns(), event.end_ns()) for event in events if event.device_type() == DeviceType.CUDA]
    if not intervals:
        raise RuntimeError(f"the profiler saw nothing run on the GPU, only {sorted({event.name() for event in events})}")
    busy, span = busy_and_span(intervals)
    return {
        "busy_ms": round(busy / sizes.steps / 1e6, 4), "profiled_ms": round(span / sizes.steps / 1e6, 4),
        "idle_percent": round(100 * (1 - busy / span), 1), "steps": sizes.steps,
        "events_step": round(len(intervals) / sizes.steps),
    }  # fmt: skip


def busy_and_span(intervals: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """How long at least one interval lasts, and how long from the first begin to the last end."""
    ordered = sorted(intervals)
    busy, end = 0, ordered[0][0]
    for start, stop in ordered:
        busy += max(stop - max(start, end), 0)
        end = max(end, stop)
    return busy, end - ordered[0][0]
