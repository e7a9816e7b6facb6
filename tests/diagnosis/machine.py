"""A simulated machine: it runs operators by a formula, so that the truth about each of them is known.

time = max(FLOPs / rate, bytes / bandwidth, latency) + fixed
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median, pstdev

from rooftile.diagnosis.experiments.evidence import Evidence
from rooftile.diagnosis.records import OperatorRow
from rooftile.diagnosis.remedies.prices import in_dtype, narrower_shares
from rooftile.diagnosis.remedies.remedy import Remedy
from rooftile.diagnosis.verdicts.findings import Finding, find
from rooftile.diagnosis.verdicts.roofs import Roofs

RUNS = 15
ADDED = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """An operator: the counts that the machine runs."""

    flops: float
    bytes: float
    latency_us: float = 0.0  # a chain of dependent instructions
    dtype: str = "fp32"

    def scaled(self, share: float) -> Work:
        """Returns the same operator on a share of its data."""
        return replace(self, flops=self.flops * share, bytes=self.bytes * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine's rates per microsecond. `noise` is the relative standard deviation of a single run."""

    flops_per_us: float
    bytes_per_us: float
    cache_bytes_per_us: float
    fixed_us: float
    launch_us: float = 0.0
    device: str = "cpu"
    noise: float = 0.0

    def exact(self, work: Work, *, cached: bool = False, added_us: float = 0.0) -> float:
        """Returns the operator's true time."""
        bandwidth = self.cache_bytes_per_us if cached else self.bytes_per_us
        parts = (work.flops / self.flops_per_us + added_us, work.bytes / bandwidth, work.latency_us)
        return max(parts) + self.fixed_us

    def evidence(self, work: Work, rng: random.Random) -> Evidence:
        """Returns what experiments would measure: medians of noisy runs."""

        def runs(true_us: float) -> list[float]:
            return [true_us * max(0.2, rng.gauss(1.0, self.noise)) for _ in range(RUNS)]

        first = runs(self.exact(work))
        time_us = median(first)
        swept = [time_us] + [median(runs(self.exact(work, added_us=r * time_us))) for r in ADDED[1:]]
        # a line through r = 0 ... 1/2 from T0, as s is defined
        low = [(r * time_us, t - time_us) for r, t in zip(ADDED, swept, strict=True) if 0 < r <= 0.5]
        cached_us = median(runs(self.exact(work, cached=True)))
        return Evidence(
            time_us=time_us,
            spread_us=1.25 * pstdev(first) / RUNS**0.5,
            in_context_us=None,
            added_us=tuple(r * time_us for r in ADDED),
            swept_us=tuple(swept),
            slope=sum(x * y for x, y in low) / sum(x * x for x, _ in low),
            cached_us=cached_us,
            gain=1 - cached_us / time_us,
            fixed_us=median(runs(self.exact(work.scaled(1 / 1024)))),
            why_not={},
        )

    def roofs(self, **changes: float) -> Roofs:
        """Returns the ceilings that a perfect measurement of this machine gives."""
        on_cpu = self.device == "cpu"
        known = Roofs(
            memory="DRAM" if on_cpu else "HBM",
            bytes_per_s=self.bytes_per_us * 1e6,
            cache="cache" if on_cpu else "L2",
            cache_bytes_per_s=self.cache_bytes_per_us * 1e6,
            arithmetic="fp32",
            flops_per_s=self.flops_per_us * 1e6,
            fixed_us=self.fixed_us,
            launch_us=self.launch_us,
        )
        return replace(known, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A kernel that the simulated host asks for."""

    host_us: float
    device_us: float
    op: str
    reads: bool = False  # the host reads its result, and waits for it


def enqueued(asked: list[Asked], tail_us: float = 0.0, *, depth: int = 1024) -> tuple[float, float]:
    """Runs a step whose host enqueues kernels for the device; returns when the host has asked for all, and when the step ends.

    A kernel is in the queue from the time when it is asked for until it ends; the host waits for room.
    """
    queue: deque[float] = deque()
    now = device_free = 0.0
    for one in asked:
        now += one.host_us
        while queue and queue[0] <= now:
            queue.popleft()
        if len(queue) == depth:
            now = queue.popleft()
        device_free = max(device_free, now) + one.device_us
        queue.append(device_free)
        now = device_free if one.reads else now
    return now + tail_us, max(now + tail_us, device_free)


def steady_us(asked: list[Asked], tail_us: float = 0.0) -> float:
    """Returns the time of a step after others, whose first kernels are asked for while the device is at the step before."""
    second = [replace(asked[0], host_us=asked[0].host_us + tail_us), *asked[1:]]
    return enqueued([*asked, *second], tail_us)[1] - enqueued(asked, tail_us)[1]


def operation(work: Work, *, device: str = "cpu", calls: int = 1, index: int = 0, op: str = "aten::x") -> OperatorRow:
    """Returns the counted operation of a simulated operator."""
    return OperatorRow(
        module="", op=op, phase="forward", calls=calls, flops=round(work.flops), special=0, bytes=round(work.bytes),
        where="train.py:7", dtype=work.dtype, device=device, key=(index,), indices=(index,),
    )  # fmt: skip


def finding(machine: Machine, work: Work, *, calls: int = 1, index: int = 0, op: str = "aten::x", seed: int = 0) -> Finding:
    """Returns the finding of a simulated operator. Without noise, its fixed part is exact."""
    evidence = machine.evidence(work, random.Random(seed))
    if not machine.noise:
        # a latency that is hidden behind the roofs is not in the line through the larger sizes
        hidden = machine.exact(replace(work, latency_us=0.0)) == machine.exact(work)
        evidence = replace(evidence, fixed_us=machine.fixed_us + (0.0 if hidden else work.latency_us))
    return find(operation(work, device=machine.device, calls=calls, index=index, op=op), machine.roofs(), evidence)


def narrower_dtype(
    rows: Iterable[tuple[int, Finding]], dtype: str, *, rate_ratio: float, bytes_ratio: float
) -> Remedy | None:  # fmt: skip
    """Prices a narrower dtype for all rows, where nothing is cast and nothing waits for the host."""
    known = dict(rows)
    shares = narrower_shares(known.items(), rate_ratio=rate_ratio, bytes_ratio=bytes_ratio)
    return in_dtype(dtype, tuple(shares), sum(known[row].time_us * (1 - share) for row, share in shares.items()))
