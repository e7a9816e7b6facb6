"""Measures one recorded call of an operator: its time alone, and the three experiments.

T0   the call alone, on the inputs that it had
E4   more arithmetic on the same bytes                              `intensity`
E5   the same arithmetic without the traffic to main memory         `cached`
E6   half, a quarter, ... of the data                               `size`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

import torch

from rooftile.diagnosis.counts.traffic import is_plain
from rooftile.diagnosis.experiments import deadline as budget
from rooftile.diagnosis.experiments.call import RepeatableCall
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.experiments.evidence import CACHE, INTENSITY, SIZE, Evidence
from rooftile.diagnosis.experiments.in_cache.slices import cached_share
from rooftile.diagnosis.experiments.intensity import growth
from rooftile.diagnosis.experiments.intensity.ladder import Ladder
from rooftile.diagnosis.experiments.intensity.references import references
from rooftile.diagnosis.experiments.intensity.sweep import Sweep, sweep
from rooftile.diagnosis.experiments.smaller.axes import CallAxis, axes
from rooftile.diagnosis.experiments.smaller.fixed import fixed_us, smaller
from rooftile.diagnosis.experiments.timing import LEAST_ROUNDS, Timer, error, interleaved
from rooftile.diagnosis.records import Sample
from rooftile.errors import Unsupported

Result = TypeVar("Result")
# bytes that experiments may take beyond the call's own; on a GPU also a quarter of the memory that is free
MEMORY = 1 << 30
# runs of the smallest call, from the cache
WARM_RUNS = 5
# a call takes at most this much longer because its code is not in the caches
COLD_CODE_US = 30.0
# slices that take more than 1.3 times as long as the whole call run in another way, and show nothing of its traffic
SLOWER = 1.3
# the least runs that each part needs, of the whole call: its time alone, in the cache, on less data (half, a quarter, ... of a
# run), and with more to do
TIMED_RUNS, CACHED_RUNS, SMALLER_RUNS, MORE_RUNS = 4, 8, 4, 10
# ... and the runs of all but the last
ALL_RUNS = 2 * LEAST_ROUNDS + TIMED_RUNS + CACHED_RUNS + SMALLER_RUNS


def alone(
    sample: Sample, timer: Timer, budget_s: float, in_context_us: float | None = None, deadline: Deadline | None = None
) -> Evidence:  # fmt: skip
    """Times a call, its parts in the cache (E5) and on less data (E6), in about `budget_s`.

    Args:
        sample: the call, with its real inputs.
        timer: of its device.
        budget_s: seconds.
        in_context_us: its time inside the step. Where given, caches are cold or warm, whichever comes nearer to it; else cold.
        deadline: which no experiment passes, however few runs it had; None: there is none.

    An experiment that is not possible has its reason in `why_not`. Memory that runs out is such a reason. The call's arguments,
    the random streams, the default dtype and the number of threads are as before.

    Raises Unsupported where there is not even time for the call itself.

    Example:
        >>> from rooftile.diagnosis.experiments.timing import HostTimer
        >>> from rooftile.diagnosis.records import Operation, Sample
        >>> row = Operation(module="", op="aten::add", phase="forward", calls=1, flops=100, special=0, bytes=800, where="",
        ...                 dtype="fp32", device="cpu", key=(), indices=(0,))
        >>> found = alone(Sample(row, torch.ops.aten.add.Tensor, (torch.ones(100), 1), {}), HostTimer(), 1.0)
        >>> 0 <= found.fixed_us <= found.time_us
        True
    """
    with _as_before(sample) as call:
        return _Measurement(sample, call, timer, deadline or Deadline()).alone(budget_s, in_context_us)


def with_intensity(found: Evidence, sample: Sample, timer: Timer, deadline: Deadline) -> Evidence:
    """Returns the evidence of `alone` with added arithmetic (E4) as well, before the deadline.

    Products get more rows; a pass over memory gets more multiply-adds per element, for which kernels are compiled. The first use
    of a dtype on a machine measures the references, too. Where the time does not allow it, `why_not` says so.
    """
    try:
        deadline.check(MORE_RUNS * found.time_us / 1e6)
    except Unsupported as reason:
        return replace(found, why_not=found.why_not | {INTENSITY: str(reason)})
    with _as_before(sample) as call:
        return _Measurement(sample, call, timer, deadline).with_intensity(found)


class _Measurement:
    """One call with its axes, and the reasons that are collected while experiments fail."""

    def __init__(self, sample: Sample, call: RepeatableCall, timer: Timer, deadline: Deadline) -> None:
        self._sample, self._call, self._timer, self._deadline = sample, call, timer, deadline
        self._why_not: dict[str, str] = {}
        began = budget.clock()
        call.run()
        self._run_s = budget.clock() - began
        self._is_plain = all(map(is_plain, call.tensors))
        self._axes: list[CallAxis] = axes(call) if self._is_plain else []

    def alone(self, budget_s: float, in_context_us: float | None) -> Evidence:
        cold = self._is_cold(in_context_us)
        samples, fixed = self._sizes(budget_s / 2, cold)
        t0 = median(samples)
        share = self._attempt(CACHE, lambda: _checked(self._cached_share(budget_s / 2, cold)))
        return Evidence(
            time_us=t0, spread_us=error(samples), in_context_us=in_context_us, fixed_us=fixed,
            cached_us=None if share is None else share * t0, gain=None if share is None else 1 - share, why_not=self._why_not,
        )  # fmt: skip

    def with_intensity(self, found: Evidence) -> Evidence:
        self._why_not = dict(found.why_not)
        grows = growth.grows(self._call)
        swept = self._attempt(INTENSITY, lambda: self._by_growth(found) if grows else self._laddered(found))
        if swept is None:
            return replace(found, why_not=self._why_not)
        times, slope = swept
        return replace(
            found, added_us=times.added_us, swept_us=times.time_us, slope=slope, knee_flops_per_byte=self._knee(times),
            why_not=self._why_not,
        )  # fmt: skip

    def _is_cold(self, in_context_us: float | None) -> bool:
        if in_context_us is None or not self._deadline.allows((2 * LEAST_ROUNDS + TIMED_RUNS) * self._run_s):
            return True
        cold, warm = (median(self._timer.once(self._call, cold=is_cold) for _ in range(3)) for is_cold in (True, False))
        return abs(cold - in_context_us) <= abs(warm - in_context_us)

    def _sizes(self, budget_s: float, cold: bool) -> tuple[list[float], float | None]:
        """T0's samples, and the fixed part; the sizes take turns with the whole."""
        smaller_calls = self._attempt(SIZE, self._smaller) or []
        calls = {1.0: self._call} | {made.share: made.call for made in smaller_calls}
        self._deadline.check_rest(LEAST_ROUNDS * self._run_s)
        taken = interleaved({share: self._once(call, cold) for share, call in calls.items()}, budget_s, self._deadline)
        if not smaller_calls:
            return taken[1.0], None
        at_zero_us = fixed_us(list(taken), [median(samples) for samples in taken.values()])
        if cold:
            # a step's next call finds the operator's code in the cache, which a cold run of nearly no data does not; a call that
            # is nearly all fixed part may not find it either
            least = min(smaller_calls, key=lambda made: made.share).call
            warm_us = median(self._timer.once(least, cold=False) for _ in range(WARM_RUNS))
            at_zero_us = min(at_zero_us, warm_us if 2 * at_zero_us < median(taken[1.0]) else max(warm_us, COLD_CODE_US))
        return taken[1.0], at_zero_us

    def _cached_share(self, budget_s: float, cold: bool) -> float:
        self._deadline.check_rest(CACHED_RUNS * self._run_s)
        return cached_share(self._call, self._axes, self._timer, budget_s, self._deadline, cold=cold)

    def _smaller(self) -> Any:
        """The call on less data. Each runs once: an operator may refuse a size that no rule knows of, such as a mask's."""
        self._deadline.check_rest((TIMED_RUNS + SMALLER_RUNS) * self._run_s)
        smaller_calls = smaller(self._call, self._axes)
        for made in smaller_calls:
            made.call.run()
        return smaller_calls

    def _once(self, call: RepeatableCall, cold: bool) -> Callable[[], float]:
        return lambda: self._timer.once(call, cold=cold)

    def _by_growth(self, found: Evidence) -> tuple[Sweep, float | None]:
        """A product's own arithmetic is what grows, so its slope needs no references: 1 is as much time as work."""
        flops = self._sample.operation.flops or 0
        # the call's whole time bounds its arithmetic, where the time from the cache is not known
        arithmetic_us = found.time_us if found.cached_us is None else min(found.cached_us, found.time_us)
        on_gpu = self._call.device.type == "cuda"
        memory = max(MEMORY, torch.cuda.mem_get_info(self._call.device)[0] // 4) if on_gpu else MEMORY
        times = growth.sweep(self._call, self._timer, found.time_us, arithmetic_us, flops, self._deadline, memory)
        return times, times.slope

    def _laddered(self, found: Evidence) -> tuple[Sweep, float | None]:
        """A slope between the slopes of the two references."""
        ladder = Ladder(self._call, self._deadline)
        read = references(ladder.dtype, self._timer, self._call.device, self._deadline)
        times = sweep(ladder, self._call, self._axes, self._timer, found.time_us, self._deadline)
        if times.slope is None:
            raise Unsupported("no rung of the ladder adds less than its own time")
        return times, read.read(times.slope)

    def _knee(self, times: Sweep) -> float | None:
        operation = self._sample.operation
        added = times.knee_flops()
        return None if added is None or not operation.bytes else (added + (operation.flops or 0)) / operation.bytes

    def _attempt(self, name: str, experiment: Callable[[], Result]) -> Result | None:
        try:
            if not self._is_plain:
                raise Unsupported("a sparse or nested tensor has no axis that could be cut or grown")
            return experiment()
        except Unsupported as reason:
            self._why_not[name] = str(reason)
        except torch.OutOfMemoryError:
            self._why_not[name] = "it needs more memory than there is"
        except (RuntimeError, IndexError) as reason:
            # an operator may refuse a size or a capture that no rule knows of: its own words are the reason
            if self._call.device.type == "cuda":
                # an error that ends the use of the GPU is raised again here
                torch.cuda.synchronize(self._call.device)
            self._why_not[name] = f"the operator refused: {str(reason).splitlines()[0][:200]}"
        return None


def _checked(share: float) -> float:
    """Returns the share of its time that a call takes in the cache, where a slice in the cache is the same program."""
    if share > SLOWER:
        raise Unsupported(f"slices that fit the cache take {share:.1f} times as long as the whole, so they run in another way")
    return share


@contextmanager
def _as_before(sample: Sample) -> Iterator[RepeatableCall]:
    """The call of a sample. Its arguments, the random streams, the default dtype and the number of threads are restored."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.inference_mode(False), torch.random.fork_rng(devices=devices):
        call = RepeatableCall.of(sample)
        try:
            # the originals are kept before anything runs
            call.restore()
            yield call
        finally:
            call.restore()
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
