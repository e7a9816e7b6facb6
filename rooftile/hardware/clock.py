"""Time and peak memory of a call, on CUDA and on the CPU.

CudaClock puts events around each call and flushes the L2 cache before it. The stream is first kept busy long enough for
the host to queue every call, so the device is timed and not Python. Peak memory is the caching allocator's.

HostClock reads the host's clock around each call. Peak memory is the most that torch's allocator had handed out and not
got back, from the profiler's allocation events; scratch space that a library takes for itself (MKL, oneDNN) is not seen.

ReplayClock captures a call in a CUDA graph and replays it back to back; CallClock times a loop of calls on the host.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import Any, Protocol, TypeVar

import torch

Work = Callable[[], Any]
Name = TypeVar("Name", bound=Hashable)


class Sampler(Protocol):
    """How a call is timed. The work has run before: compiling is not a clock's business."""

    def samples(self, work: Work) -> list[float]:
        """Times of single calls in µs: as many as fit the time that a round has, at least one."""


class Clock(Sampler, Protocol):
    """How one kind of device is timed, and the memory of a call measured."""

    peak_kind: str

    def peak_bytes(self, work: Work) -> int:
        """The most memory that a call holds beyond what was held before it, its results included."""


def clock_for(device: torch.device, budget_ms: float = 25.0) -> Clock:
    """The clock of a device; a round of one call's samples takes about budget_ms."""
    return CudaClock(device, budget_ms) if device.type == "cuda" else HostClock(budget_ms)


def take_turns(works: Mapping[Name, Work], clock: Sampler, rounds: int = 4) -> dict[Name, list[float]]:
    """All samples of each work in µs; the works take turns."""
    taken: dict[Name, list[float]] = {name: [] for name in works}
    for turn in range(rounds):
        # back and forth: a chip that has been busy for a while clocks lower
        for name in list(works)[:: -1 if turn % 2 else 1]:
            taken[name] += clock.samples(works[name])
    return taken


def medians(works: Mapping[Name, Work], clock: Sampler, rounds: int = 4) -> dict[Name, float]:
    """The median of all samples of each work in µs; the works take turns."""
    return {name: median(samples) for name, samples in take_turns(works, clock, rounds).items()}


class HostClock:
    """perf_counter around each call."""

    peak_kind = "torch allocator, by the profiler's allocation events"

    def __init__(self, budget_ms: float) -> None:
        self._budget_us = budget_ms * 1e3

    def samples(self, work: Work) -> list[float]:
        first = self._once(work)
        if first > 20 * self._budget_us:
            return [first]
        # a short first call found cold caches and sleeping threads, and does not count
        taken: list[float] = []
        while sum(taken) < self._budget_us:
            taken.append(self._once(work))
        return taken

    def peak_bytes(self, work: Work) -> int:
        from torch.profiler import ProfilerActivity, profile

        # else the profiler writes of its own start and stop on stderr
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        # acc_events: torch 2.11 warns on every use without it
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
            kept = work()
        del kept
        events = seen.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        held = peak = 0
        for _, change in changes:
            held += change
            peak = max(peak, held)
        return peak

    @staticmethod
    def _once(work: Work) -> float:
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e6


class CudaClock:
    """Events around each call, on the current stream of a device."""

    peak_kind = "torch.cuda.max_memory_allocated"
    # the launch queue holds about a thousand entries; past it the host waits
    _MOST = 50

    def __init__(self, device: torch.device, budget_ms: float) -> None:
        self._device = device
        self._budget_us = budget_ms * 1e3
        l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._flushed = torch.empty(max(2 * l2_bytes, 1 << 28) // 4, dtype=torch.int32, device=device)

    def samples(self, work: Work) -> list[float]:
        work()
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        work()
        # the host's part of a call, with the flush and two events that come on top
        queueing_us = (time.perf_counter() - start) * 1e6 + 30.0
        torch.cuda.synchronize(self._device)
        usual_us = min(self._timed(work, 2, 2 * queueing_us))
        count = max(min(int(self._budget_us / usual_us), self._MOST), 1)
        return self._timed(work, count, count * queueing_us)

    def peak_bytes(self, work: Work) -> int:
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        kept = work()
        torch.cuda.synchronize(self._device)
        del kept
        return torch.cuda.max_memory_allocated(self._device) - before

    def _timed(self, work: Work, count: int, busy_us: float) -> list[float]:
        marks = [(_event(), _event()) for _ in range(count)]
        # about two cycles a nanosecond on the GPUs of the day
        torch.cuda._sleep(int(min(busy_us, 20e3) * 2000))
        for start, stop in marks:
            self._flushed.zero_()
            start.record()
            work()
            stop.record()
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(stop) * 1e3 for start, stop in marks]


class ReplayClock:
    """CUDA graphs replayed back to back, as a serving engine runs a step: a sample is the mean of `times` replays.

    The L2 cache is not flushed, so a work must read much more than it holds. Events around single calls would add the time
    that a launch takes, and a flush before each leaves an L2 full of lines that must be written back meanwhile.
    """

    def __init__(self, times: int = 10) -> None:
        self._times = times
        self._graphs: dict[Work, torch.cuda.CUDAGraph] = {}

    def samples(self, work: Work) -> list[float]:
        """One sample in µs. The first one captures the work."""
        if work not in self._graphs:
            self._graphs[work] = captured(work)
        replay = self._graphs[work].replay
        start, stop = _event(), _event()
        replay()
        start.record()
        for _ in range(self._times):
            replay()
        stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) * 1e3 / self._times]


class CallClock:
    """The host's time per call in a loop of calls: a sample is the mean of `calls`.

    Args:
        device: a GPU is waited for before and after each loop.
        calls: of one loop.
        wait: whether the wait after the loop counts. With small tensors and `wait=False` the host's own work is timed; with
            `wait=True` the time per call of a program that does nothing else.
    """

    def __init__(self, device: torch.device, calls: int = 1000, *, wait: bool = False) -> None:
        self._device, self._calls, self._wait = device, calls, wait

    def samples(self, work: Work) -> list[float]:
        """One sample in µs, without garbage collection."""
        collects = gc.isenabled()
        gc.disable()
        try:
            self._synchronise()
            start = time.perf_counter()
            for _ in range(self._calls):
                work()
            if self._wait:
                self._synchronise()
            taken = time.perf_counter() - start
        finally:
            if collects:
                gc.enable()
        self._synchronise()
        return [taken / self._calls * 1e6]

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def captured(work: Work) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call, which is run once before it is captured."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
