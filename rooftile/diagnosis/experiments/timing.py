"""Times of a call alone: with cold caches as in a step whose other operators have used them, and in a row from the cache.

Samples of several calls take turns, so that load on the machine meets all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from threading import Barrier, BrokenBarrierError, Thread
from typing import Protocol, TypeVar

import torch

from rooftile.diagnosis.experiments import deadline as budget
from rooftile.diagnosis.experiments.call import RepeatableCall
from rooftile.diagnosis.experiments.capture import capturing
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.hardware.device import describe
from rooftile.hardware.rates import one_thread

Name = TypeVar("Name", bound=Hashable)
# a run in the cache is repeated for so long, and so often at most
BURST_US, MOST_RUNS = 2e3, 200
SHORT_US = 50.0
# samples without which a time says nothing
LEAST_ROUNDS = 3


class Timer(Protocol):
    """How calls on one kind of device are timed."""

    cache_bytes: int  # the cache that E5 stays in
    tried: tuple[int, int]  # two numbers of multiply-adds whose times in the cache tell how long one takes

    def once(self, call: RepeatableCall, *, cold: bool) -> float:
        """Returns the time of one run in µs."""

    def used(self, call: RepeatableCall, *, cold: bool = True) -> float:
        """Returns the time of one run in µs, of all threads together on a CPU."""

    def burst(self, call: RepeatableCall) -> float:
        """Returns the time per run in µs of runs in a row; on a CPU each run is on one thread, and all threads are busy."""

    def threads(self, call: RepeatableCall) -> float:
        """Returns how many threads compute a run, on average."""


def timer_for(device: torch.device) -> Timer:
    """Returns the timer of a device."""
    return DeviceTimer(device) if device.type == "cuda" else HostTimer()


class HostTimer:
    """Times on a CPU.

    Only `once` reads the clock on the wall. Experiments compare the time that a call's threads used: programs beside it do not
    count, and threads that wait for memory do.
    """

    # one thread hides no arithmetic behind its cache
    tried = 0, 64

    def __init__(self) -> None:
        self.cache_bytes = describe("cpu").l2_bytes or 1 << 19
        self._evicting = torch.rand(min(2 * last_level_bytes(), 1 << 29) // 4)

    def once(self, call: RepeatableCall, *, cold: bool) -> float:
        self._prepare(call, cold)
        start = time.perf_counter()
        call.run()
        return (time.perf_counter() - start) * 1e6

    def used(self, call: RepeatableCall, *, cold: bool = True) -> float:
        # threads that sleep are woken at the beginning of a parallel run, which may take longer than the run. Threads that still
        # wait actively are there at once, as in a step, but beside a run of a single thread they use time of their own
        return min(self._used(call, cold, awake=awake) for awake in (False, True))

    def _used(self, call: RepeatableCall, cold: bool, *, awake: bool) -> float:
        threads = ThreadTimes()
        self._prepare(call, cold)
        if not awake:
            threads.wait_until_idle()
        start = threads.now()
        call.run()
        return (threads.now() - start) * 1e6

    def burst(self, call: RepeatableCall) -> float:
        with one_thread() as threads:
            self._own_time(call)
            # short runs would wait for each other's Python
            alone = threads == 1 or self._own_time(call) < SHORT_US
            # two threads of one core share its units, as they do in the whole call
            copies = [call] if alone else [call, *(call.on(_own(call)) for _ in range(threads - 1))]
            together = Barrier(len(copies))
            taken: list[float] = []
            others = [Thread(target=self._repeated, args=(copy, together, taken)) for copy in copies[1:]]
            for other in others:
                other.start()
            self._repeated(call, together, taken)
            for other in others:
                other.join()
        return sum(taken) / len(taken)

    def _repeated(self, call: RepeatableCall, together: Barrier, taken: list[float]) -> None:
        """Appends the median time of runs in a row, begun together with the other threads."""
        # a library may ask this thread itself how many it may use
        torch.set_num_threads(1)
        try:
            self._own_time(call)
            together.wait()
            samples = [self._own_time(call)]
            end = time.perf_counter() + BURST_US / 1e6
            while time.perf_counter() < end and len(samples) < MOST_RUNS:
                samples.append(self._own_time(call))
            taken.append(median(samples))
        except BrokenBarrierError:
            # another thread has failed, and raises
            return
        except BaseException:
            together.abort()
            raise

    def threads(self, call: RepeatableCall) -> float:
        call.restore()
        call.run()
        threads = ThreadTimes()
        threads.wait_until_idle()
        start, used = time.perf_counter(), threads.now()
        runs = 0
        while runs < 3 or (time.perf_counter() - start < 0.02 and runs < 1000):
            call.restore()
            call.run()
            runs += 1
        used, taken = threads.now() - used, time.perf_counter() - start
        return min(max(used / taken, 1e-3), float(torch.get_num_threads()))

    def _prepare(self, call: RepeatableCall, cold: bool) -> None:
        call.restore()
        if cold:
            self._evicting.mul_(1.0)
        else:
            call.run()
            call.restore()

    @staticmethod
    def _own_time(call: RepeatableCall) -> float:
        call.restore()
        start = time.thread_time()
        call.run()
        return (time.thread_time() - start) * 1e6


class DeviceTimer:
    """Times on a GPU, between events. The stream is kept busy while the host queues a call, so the host is not timed."""

    _RUNS = 20  # replays of one CUDA graph
    # fewer hide behind the traffic to the L2: on an H100 64 in fp32 add only half of the time that they take
    tried = 128, 256

    def __init__(self, device: torch.device) -> None:
        self._device = device
        l2_bytes = describe(device).l2_bytes or 1 << 26
        self.cache_bytes = l2_bytes // 2
        self._evicting = torch.ones(4 * l2_bytes // 4, dtype=torch.int32, device=device)

    def once(self, call: RepeatableCall, *, cold: bool) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call.restore()
        queueing_us = self._queueing_us(call)
        call.restore()
        keep_busy(self._device, queueing_us)
        if cold:
            self._evicting.add_(1)
        start.record()
        call.run()
        stop.record()
        torch.cuda.synchronize(self._device)
        return start.elapsed_time(stop) * 1e3

    def used(self, call: RepeatableCall, *, cold: bool = True) -> float:
        return self.once(call, cold=cold)

    def burst(self, call: RepeatableCall) -> float:
        call.restore()
        queueing_us = self._RUNS * self._queueing_us(call)
        runs = self._runs(call)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        taken = []
        for _ in range(5):
            call.restore()
            keep_busy(self._device, queueing_us)
            start.record()
            runs()
            stop.record()
            torch.cuda.synchronize(self._device)
            taken.append(start.elapsed_time(stop) * 1e3 / self._RUNS)
        return median(taken[1:])

    def threads(self, call: RepeatableCall) -> float:
        return 1.0

    def _runs(self, call: RepeatableCall) -> Callable[[], None]:
        """Several runs of a call, as a CUDA graph if they can be one."""

        def one_by_one() -> None:
            for _ in range(self._RUNS):
                call.run()

        if any(x.device.type == "cpu" for x in call.tensors):
            # inside a graph, attention's backward takes the address of its seed on the host for one on the GPU
            return one_by_one
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._device):
            one_by_one()
        return graph.replay

    @staticmethod
    def _queueing_us(call: RepeatableCall) -> float:
        """The time in which the host queues a call, with some room."""
        start = time.perf_counter()
        call.run()
        return (time.perf_counter() - start) * 1e6 + 50.0


def keep_busy(device: torch.device, us: float) -> None:
    """Lets a GPU wait, so that what is queued now runs without gaps."""
    torch.cuda.synchronize(device)
    # about two cycles per nanosecond
    torch.cuda._sleep(int(min(us, 20e3) * 2000))


def _own(call: RepeatableCall) -> list[torch.Tensor]:
    """The call's tensors, with copies of the tensors that it writes."""
    return [x.clone() if n in call.written else x for n, x in enumerate(call.tensors)]


class ThreadTimes:
    """The processor time that all threads of this process have used, in seconds.

    The process's own clock knows of threads on other cores only what they had used at the last tick, up to 4 ms ago. Linux tells
    the time of a thread exactly.
    """

    def __init__(self) -> None:
        folder = Path("/proc/self/task")
        # this is what pthread_getcpuclockid computes; Python has it for its own threads only
        self._clocks = [~int(path.name) << 3 | 6 for path in folder.iterdir()] if folder.exists() else []

    def now(self) -> float:
        """Returns the time of the threads that there were at the beginning."""
        if not self._clocks:
            return time.process_time()
        return sum(_thread_time(clock) for clock in self._clocks)

    def wait_until_idle(self) -> None:
        """Waits for threads that still wait actively for the next parallel region: that time belongs to no run."""
        for _ in range(50):
            before = self.now() - time.thread_time()
            time.sleep(5e-4)
            if self.now() - time.thread_time() - before < 5e-5:
                return


def _thread_time(clock: int) -> float:
    try:
        return time.clock_gettime(clock)
    except OSError:
        # the thread has ended
        return 0.0


def interleaved(
    works: Mapping[Name, Callable[[], float]], budget_s: float, deadline: Deadline | None = None, *, fewest: int = 5,
    most: int = 30, exact: float = 0.02,
) -> dict[Name, list[float]]:  # fmt: skip
    """Returns samples of each work; the works take turns.

    It ends when the standard error of each median is below `exact` of it, with the budget, or after `most` rounds, but never
    before `fewest` (three, where the budget has ended).

    Raises Unsupported where the deadline does not allow three.
    """
    taken: dict[Name, list[float]] = {name: [] for name in works}
    soon, last, round_s = Deadline(budget_s), deadline or Deadline(), 0.0
    for turn in range(most):
        is_over = not soon.allows(0.0) or not last.allows(round_s)
        enough = turn >= (LEAST_ROUNDS if is_over else fewest)
        if enough and (is_over or all(error(x) <= exact * median(x) for x in taken.values())):
            break
        began = budget.clock()
        # back and forth: a chip that has been busy for a while clocks lower
        for name in list(works)[:: -1 if turn % 2 else 1]:
            taken[name].append(works[name]())
            if turn < LEAST_ROUNDS - 1:
                last.check_rest((LEAST_ROUNDS - 1 - turn) * sum(samples[-1] for samples in taken.values() if samples) / 1e6)
        round_s = budget.clock() - began
    return taken


def low(samples: Sequence[float]) -> float:
    """Returns the first quartile: what else a machine does only adds to the time that a thread uses."""
    return quantiles(samples, n=4)[0] if len(samples) > 1 else samples[0]


def error(samples: Sequence[float]) -> float:
    """Returns the standard error of the median, from the distance of the quartiles."""
    if len(samples) < 2:
        return 0.0
    low, _, high = quantiles(samples, n=4)
    # 1.349 standard deviations of a normal distribution lie between its quartiles, and its median errs 1.253 times the mean
    return 1.253 * (high - low) / 1.349 / math.sqrt(len(samples))


def last_level_bytes() -> int:
    """Returns the size of this CPU's largest cache; 64 MiB if the system does not tell."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(size.rstrip("KMG")) * units.get(size[-1], 1) for size in sizes), default=1 << 26)
