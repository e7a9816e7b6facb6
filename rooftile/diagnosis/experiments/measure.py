"""The experiments on one recorded call: alone, on slices that stay in the cache, on less data, with more arithmetic.

    T0   the call alone
    E4   more arithmetic on the same bytes: products with more rows, which read the same weights
    E5   the same arithmetic without the traffic: the call on a slice that stays in the cache, as often as the whole needs
    E6   half, a quarter, ... of the data: what is left at nothing is the fixed part

Times are medians of runs that take turns, so that the machine's other work falls on all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from statistics import median, quantiles

import torch

from rooftile.diagnosis.experiments.evidence import Evidence
from rooftile.diagnosis.experiments.scaled import Run, Scaled, grown, part, whole
from rooftile.diagnosis.records import Sample
from rooftile.diagnosis.steps import wait_for

# a slice of so many bytes stays in the cache, and is worth the threads' time to begin
CPU_SLICE = 2 << 20
# half of an H100's L2 cache
GPU_SLICE = 20 << 20
SHARES = (1 / 2, 1 / 4, 1 / 8, 1 / 16)
LEAST_RUNS, MOST_RUNS = 3, 40
# rows of a product are grown at most so often
MOST_GROWN = 64
# below this, Python's call and the clock are most of what is timed, so calls are timed in a row
ROW_US = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long the experiments on one operator may take, and the rate that its arithmetic is priced with."""

    seconds: float
    flops_per_s: float


def evidence(sample: Sample, device: torch.device, limits: Limits, in_context_us: float | None = None) -> Evidence:
    """Runs the experiments on one recorded call, in about `limits.seconds`."""
    operation = sample.operation
    why_not: dict[str, str] = {}
    works: dict[str, Scaled] = {"T0": Scaled(whole(sample), 1.0)}
    if _changes_inputs(sample):
        why_not["any"] = "the operator changes its inputs, so a second run would meet others"
    else:
        for share in SHARES:
            smaller = part(sample, share)
            if smaller is not None and smaller.share not in [w.share for w in works.values()]:
                works[f"1/{round(1 / share)}"] = smaller
        if len(works) < 3:
            why_not["size"] = "none of its axes can be cut"
        slice_bytes = GPU_SLICE if device.type == "cuda" else CPU_SLICE
        if operation.bytes is None:
            why_not["cache"] = "no rule counts its bytes"
        elif operation.bytes <= 2 * slice_bytes:
            why_not["cache"] = "all of it fits into the cache"
        elif (piece := part(sample, slice_bytes / operation.bytes)) is None:
            why_not["cache"] = "none of its axes can be cut"
        else:
            works["cached"] = piece
        arithmetic_us = (operation.flops or 0) / limits.flops_per_s * 1e6
        times = _growth(arithmetic_us, in_context_us or 0.0)
        more = grown(sample, times) if operation.flops else None
        if more is None:
            why_not["intensity"] = "added arithmetic needs a kernel that is generated for this operator; there is none yet"
        else:
            works["grown"] = more
    us = _times({name: work.run for name, work in works.items()}, device, limits.seconds, why_not)
    alone = us["T0"]
    # the least of each: a parallel region on cores that others keep busy can cost milliseconds
    fixed_us = _fixed_part({works[name].share: min(taken) for name, taken in us.items() if name == "T0" or "/" in name})
    cached_us = _cached_us(us.get("cached"), works.get("cached"), fixed_us or 0.0)
    t0 = median(alone)
    added_us, slope = _slope(t0, us.get("grown"), works.get("grown"), operation.flops, limits.flops_per_s)
    return Evidence(
        time_us=t0, spread_us=_spread(alone), in_context_us=in_context_us, added_us=added_us,
        swept_us=(t0, median(us["grown"])) if slope is not None else (), slope=slope, cached_us=cached_us,
        gain=None if cached_us is None else 1 - cached_us / t0, fixed_us=fixed_us, why_not=why_not,
    )  # fmt: skip


def _changes_inputs(sample: Sample) -> bool:
    schema = getattr(sample.function, "_schema", None)
    return schema is not None and any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)


def _times(works: Mapping[str, Run], device: torch.device, seconds: float, why_not: dict[str, str]) -> dict[str, list[float]]:
    """Samples of each work in µs, in turns, until the time is over; what fails is left out, with its reason."""
    loops: dict[str, Callable[[], float]] = {}
    taken: dict[str, list[float]] = {}
    with torch.no_grad():
        for name, work in works.items():
            try:
                loops[name] = _timed(work, device)
            except (RuntimeError, IndexError, ValueError) as error:
                if name == "T0":
                    raise
                why_not[{"cached": "cache", "grown": "intensity"}.get(name, "size")] = str(error).splitlines()[0]
        end = time.perf_counter() + seconds
        while any(len(taken.get(name, ())) < LEAST_RUNS for name in loops) or time.perf_counter() < end:
            for name, loop in loops.items():
                taken.setdefault(name, []).append(loop())
            if all(len(samples) >= MOST_RUNS for samples in taken.values()):
                break
    return taken


def _timed(work: Run, device: torch.device) -> Callable[[], float]:
    """A function that times one call in µs; of short calls it times several in a row."""

    def run(count: int) -> float:
        wait_for(device)
        start = time.perf_counter()
        for _ in range(count):
            work()
        wait_for(device)
        return (time.perf_counter() - start) * 1e6 / count

    run(1)
    count = max(1, min(100, round(ROW_US / max(run(1), 1.0))))
    return lambda: run(count)


def _fixed_part(by_share: Mapping[float, float]) -> float | None:
    """Returns the time that the line through the two smallest shares has at nothing, at least 0."""
    if len(by_share) < 3:
        return None
    (small, t_small), (next_one, t_next) = sorted(by_share.items())[:2]
    return max(0.0, t_small - small * (t_next - t_small) / (next_one - small))


def _cached_us(taken: list[float] | None, piece: Scaled | None, fixed_us: float) -> float | None:
    if taken is None or piece is None:
        return None
    return (max(median(taken) - fixed_us, 0.0)) / piece.share + fixed_us


def _growth(arithmetic_us: float, call_us: float) -> int:
    """How many times the rows a product gets, so that the added arithmetic alone takes half of the call's time or more."""
    return min(MOST_GROWN, 1 + max(1, ceil(call_us / 2 / max(arithmetic_us, 1e-3))))


def _slope(
    t0: float, taken: list[float] | None, more: Scaled | None, flops: int | None, flops_per_s: float
) -> tuple[tuple[float, ...], float | None]:
    """How much of the added arithmetic is seen: 0 none of it, 1 all that the ceiling lets expect."""
    if taken is None or more is None or not flops:
        return (), None
    added = (more.share - 1) * flops / flops_per_s * 1e6
    return (0.0, added), (median(taken) - t0) / added


def _spread(samples: list[float]) -> float:
    """The standard error of the median, from the quartiles."""
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return float((high - low) / 1.35 * 1.25 / len(samples) ** 0.5)
