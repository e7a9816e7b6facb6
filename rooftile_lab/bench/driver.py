"""Sends the requests of a workload to an engine, step by step, and records when their tokens come.

Arrivals keep their times whatever the engine does, so the time that a request waits for admission counts as the engine's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Literal, Protocol, cast

from rooftile.engine.engine import Engine
from rooftile.engine.requests.request import Request
from rooftile.engine.steps.runner import Result, Runner
from rooftile.engine.steps.scheduler import StepPlan
from rooftile.errors import InvalidInput
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.workloads import Workload, WorkloadRequest

Fate = Literal["waiting", "answered", "gone", "refused"]


class Clock(Protocol):
    """A clock that can wait."""

    def now(self) -> float:
        """Seconds since a fixed moment."""
        ...

    def sleep(self, seconds: float) -> None:
        """Waits a number of seconds."""
        ...


class WallClock:
    """The machine's clock."""

    def now(self) -> float:
        """Seconds since a fixed moment."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Waits a number of seconds."""
        time.sleep(seconds)


@dataclass(slots=True)
class Trace:
    """The history of a request; times are in seconds from the start."""

    prompt: int
    """Tokens of the prompt and of the conversation before it."""
    arrived: float = 0.0
    times: list[float] = field(default_factory=list)
    """When it got tokens, one for each answer that was running."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of its answers."""
    ended: float = 0.0
    fate: Fate = "waiting"


@dataclass(slots=True)
class Sample:
    """The cache and the engine during a step. Steps took `weight` seconds until the next sample."""

    waste: float
    saved: float
    running: int
    weight: float = 0.0


@dataclass(slots=True)
class Course:
    """One run of a workload."""

    traces: list[Trace]
    samples: list[Sample]
    seconds: float
    host_seconds: float
    """The host's time in steps without waiting for a GPU; on a CPU without the model's computation."""
    steps: int
    read: int
    """Tokens that the model has read, tokens of answers included."""
    preemptions: int


class Watch:
    """A runner that times what is not the host's bookkeeping, and samples the cache every few steps.

    Between two steps the blocks of finished answers are free and new requests are not admitted: samples are taken in a step.
    """

    def __init__(self, engine: Engine, clock: Clock, every: int) -> None:
        self._engine, self._clock, self._every = engine, clock, every
        self._runner = engine.runner
        self._computes_here = engine.runner.device.type == "cpu"
        self._steps = 0
        self.samples: list[Sample] = []
        self.elsewhere = 0.0
        """Seconds in which the host waited, or worked for somebody other than the engine."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, plan: StepPlan) -> Result:
        """Runs the runner's step."""
        began = self._clock.now()
        result = self._runner.run(plan)
        begun = self._clock.now()
        if self._computes_here:
            self.elsewhere += begun - began
        elif result.found.arrived is not None:
            result.found = result.found._replace(arrived=cast(Any, Arrival(result.found.arrived, self)))
        if self._steps % self._every == 0:
            pool, running = self._engine.pool, self._engine.scheduler.running
            self.samples.append(Sample(pool.waste(), pool.saved(), sum(len(request.live) for request in running)))
            self.elsewhere += self._clock.now() - begun
        self._steps += 1
        return result

    def wait(self, event: Any) -> None:
        """Waits for a step that is in flight on the device."""
        began = self._clock.now()
        event.synchronize()
        self.elsewhere += self._clock.now() - began


class Arrival:
    """An event whose wait is timed by a watch."""

    def __init__(self, event: Any, watch: Watch) -> None:
        self._event, self._watch = event, watch

    def synchronize(self) -> None:
        """Waits for the event."""
        self._watch.wait(self._event)


def drive(
    engine: Engine, workload: Workload, *, clock: Clock | None = None, every: int = 16, say: Progress | None = None
) -> Course:
    """Runs a workload to its end.

    Args:
        engine: idle; its prefix cache is left as it is.
        workload: its token ids are ones that the model has, or is meant to refuse.
        clock: by default the machine's.
        every: the number of steps between samples of the cache; a sample takes a pass over all block tables.
        say: called now and then with the progress.
    """
    clock = clock or WallClock()
    watch = Watch(engine, clock, every)
    before, preempted = dict(engine.steps), engine.scheduler.preemptions
    engine.runner = cast(Runner, watch)
    client = _Client(engine, workload)
    stepping, steps = 0.0, 0
    start = clock.now()
    try:
        while True:
            now = clock.now() - start
            client.send(now)
            if engine.idle:
                if client.due is None:
                    break
                clock.sleep(max(client.due - now, 0.0))
                continue
            began = clock.now()
            changed = engine.step()
            ended = clock.now()
            stepping += ended - began
            if watch.samples:
                watch.samples[-1].weight += ended - began
            client.take(changed, ended - start)
            steps += 1
            if say is not None and steps % 64 == 0:
                say(f"{client.done:,} of {len(workload.requests):,} requests, step {steps:,}")
    finally:
        engine.runner = watch._runner
        client.leave()
    return Course(
        traces=client.traces,
        samples=watch.samples,
        seconds=clock.now() - start,
        host_seconds=stepping - watch.elsewhere,
        steps=engine.steps["steps"] - before.get("steps", 0),
        read=engine.steps["tokens"] - before.get("tokens", 0),
        preemptions=engine.scheduler.preemptions - preempted,
    )


class _Client:
    """All clients: sends requests when they are due, and records their traces."""

    def __init__(self, engine: Engine, workload: Workload) -> None:
        self._engine, self._workload = engine, workload
        self.traces = [Trace(len(ask.prompt)) for ask in workload.requests]
        self.done = 0
        self._due = [(ask.at, n) for n, ask in enumerate(workload.requests) if ask.after is None]
        heapify(self._due)
        self._next: dict[int, list[int]] = defaultdict(list)
        for n, ask in enumerate(workload.requests):
            if ask.after is not None:
                self._next[ask.after].append(n)
        self._prompts: dict[int, list[int]] = {}
        self._running: dict[Request, int] = {}
        self._impatient: list[Request] = []

    @property
    def due(self) -> float | None:
        """The time at which the next request is due."""
        return self._due[0][0] if self._due else None

    def send(self, now: float) -> None:
        """Sends the requests that are due."""
        while self._due and self._due[0][0] <= now:
            at, n = heappop(self._due)
            ask, trace = self._workload.requests[n], self.traces[n]
            trace.arrived = at
            prompt = self._prompts.pop(n, ask.prompt)
            trace.prompt = len(prompt)
            try:
                request = self._engine.add(prompt, ask.params)
            except InvalidInput:
                self._end(n, "refused", now)
                continue
            self._running[request] = n
            if ask.gone == 0:
                self._impatient.append(request)

    def take(self, changed: list[Request], now: float) -> None:
        """Records the tokens of a step."""
        for request in changed:
            n = self._running.get(request)
            if n is None:
                continue
            ask, trace = self._workload.requests[n], self.traces[n]
            lengths = [answer.generated for answer in request.answers]
            if lengths != trace.lengths:
                trace.lengths = lengths
                trace.times.append(now)
            if not request.live:
                del self._running[request]
                self._go_on(n, request, now)
                self._end(n, "answered", now)
            elif ask.gone and lengths[0] >= ask.gone:
                self._abort(request, now)
        for request in self._impatient:
            if request in self._running:
                self._abort(request, now)
        self._impatient.clear()

    def leave(self) -> None:
        """Aborts what still runs, as after an error."""
        for request in list(self._running):
            self._engine.abort(request)

    def _abort(self, request: Request, now: float) -> None:
        self._engine.abort(request)
        self._end(self._running.pop(request), "gone", now)

    def _go_on(self, n: int, request: Request, now: float) -> None:
        """Schedules the next turns of a conversation."""
        for follower in self._next[n]:
            ask = self._workload.requests[follower]
            self._prompts[follower] = [*request.answers[0].ids, *ask.prompt][-self._workload.cut :]
            heappush(self._due, (now + ask.at, follower))

    def _end(self, n: int, fate: Fate, now: float) -> None:
        self.traces[n].fate = fate
        self.traces[n].ended = now
        self.done += 1


def fitted(workload: Workload, vocabulary: int) -> tuple[WorkloadRequest, ...]:
    """The requests of a workload with the token ids of a smaller vocabulary; invalid ids stay invalid."""
    return tuple(
        ask._replace(prompt=[token % vocabulary if 0 <= token < 1 << 20 else token for token in ask.prompt])
        for ask in workload.requests
    )
