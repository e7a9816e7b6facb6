"""Times an engine's steps while all requests decode, and how long the GPU is idle in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from random import Random
from statistics import mean
from time import perf_counter
from typing import NamedTuple

from rooftile.engine.engine import Engine
from rooftile.engine.sampling.params import SamplingParams
from rooftile.hardware.profiler import device_intervals

# token ids of prompts are below this, which is less than the smallest vocabulary of a published model
IDS = 10_000


class DecodeSizes(NamedTuple):
    """How many requests decode, the mean of their tokens half-way through the steps, and how many steps there are."""

    batch: int
    context: int
    steps: int

    @classmethod
    def of(cls, scale: float = 1.0) -> DecodeSizes:
        """256 requests of 640 tokens, 64 steps; scaled down for a smaller machine."""
        return cls(*(max(1, round(number * scale)) for number in (256, 640, 64)))

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"


@contextmanager
def decoding(engine: Engine, sizes: DecodeSizes) -> Iterator[Callable[[], float]]:
    """Fills the engine with requests that all decode for the steps to come, and aborts them at the end.

    Yields a function that returns the mean of their tokens.
    """
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


def milliseconds(engine: Engine, sizes: DecodeSizes) -> tuple[float, float]:
    """Milliseconds per step, and the mean context half-way. On a GPU each step begins before the last has ended."""
    with decoding(engine, sizes) as context:
        first, began = context(), perf_counter()
        for _ in range(sizes.steps):
            engine.step()
        seconds = perf_counter() - began
        return seconds / sizes.steps * 1e3, (first + context()) / 2


def idle(engine: Engine, sizes: DecodeSizes) -> dict[str, float]:
    """How long a GPU is busy in such steps, and the share of the time in which it is idle: from the profiler."""
    with decoding(engine, sizes):
        intervals = device_intervals(engine.step, sizes.steps)
    busy, span = busy_and_span(intervals)
    return {
        "busy_ms": round(busy / sizes.steps / 1e6, 4), "profiled_ms": round(span / sizes.steps / 1e6, 4),
        "idle_percent": round(100 * (1 - busy / span), 1), "steps": sizes.steps,
        "events_per_step": round(len(intervals) / sizes.steps),
    }  # fmt: skip


def busy_and_span(intervals: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The time that at least one interval covers, and the time from the first begin to the last end."""
    ordered = sorted(intervals)
    busy, end = 0, ordered[0][0]
    for start, stop in ordered:
        busy += max(stop - max(start, end), 0)
        end = max(end, stop)
    return busy, end - ordered[0][0]
