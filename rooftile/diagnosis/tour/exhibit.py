"""An exhibit of the tour: times that the ceilings predict, times that are measured, and one sentence about both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rooftile.hardware.ceilings import Ceilings
from rooftile.hardware.clock import CallClock, Work, take_turns

# a case is called so often that this passes, at least once, in each of its rounds
ROUND_US = 20e3
ROUNDS = 5


class Expected(NamedTuple):
    """A predicted time, and what takes it."""

    us: float
    bound: str  # "memory", "compute" or "overhead"


def one_after_another(parts: Sequence[Expected]) -> Expected:
    """Returns the time of operators of which each waits for the one before; its bound is the bound of the longest."""
    return Expected(sum(part.us for part in parts), max(parts, key=lambda part: part.us).bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExhibitCase:
    """One way to do the work."""

    name: str
    expected: Expected
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """Several cases that differ in one thing."""

    title: str
    does: str  # the work, in a sentence or two
    cases: tuple[ExhibitCase, ...]
    lesson: Callable[[Mapping[str, float]], str]  # from measured times in µs by case


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An exhibit that was measured. A case that could not run is in `failed`, with the reason."""

    exhibit: Exhibit
    measured_us: dict[str, float]
    failed: dict[str, str]

    @property
    def sentence(self) -> str:
        """The lesson, if all cases could be measured."""
        if self.failed:
            name, reason = next(iter(self.failed.items()))
            return f"{name} could not run here: {reason}"
        return self.exhibit.lesson(self.measured_us)


@dataclass(frozen=True, slots=True)
class Lab:
    """The machine of the tour.

    Example:
        >>> lab = Lab(torch.device("cpu"), ceilings.measure("cpu"))
        >>> lab.expect(bytes=2**30).bound
        'memory'
    """

    device: torch.device
    ceilings: Ceilings

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def expect(
        self, *, bytes: float = 0, flops: float = 0, special: float = 0, product: str = "", calls: int = 1
    ) -> Expected:  # fmt: skip
        """Predicts a time from the ceilings: the longest of traffic, arithmetic and calls; a CPU's calls come on top.

        Args:
            bytes: read and written.
            flops: multiplications and additions.
            special: exponentials and the like, at the rate of an exponential.
            product: the dtype, if matrix products have the FLOPs.
            calls: operators.
        """
        c = self.ceilings
        rate = c.matmul_tflops[product] if product else c.fma_tflops
        compute_us = max(flops / rate / 1e6, special / c.special_gops / 1e3)
        parts = {"memory": bytes / c.copy_gbs / 1e3, "compute": compute_us, "overhead": calls * c.launch_us}
        bound = max(parts, key=lambda part: parts[part])
        if self.on_gpu:
            # calls are sent ahead while the device works
            return Expected(parts[bound], bound)
        return Expected(max(parts["memory"], parts["compute"]) + parts["overhead"], bound)


def show(exhibit: Exhibit, device: torch.device) -> Shown:
    """Measures the cases of an exhibit, in turns.

    The fastest round of each counts, as for the ceilings: it was disturbed least by what else runs on the machine.
    """
    failed: dict[str, str] = {}
    measured: dict[str, float] = {}
    with torch.no_grad():
        clocks: dict[int, dict[str, Work]] = {}
        for case in exhibit.cases:
            try:
                case.work()
            except (RuntimeError, NotImplementedError) as error:
                # no compiler, or no memory
                failed[case.name] = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
                continue
            once_us = CallClock(device, 1, wait=True).samples(case.work)[0]
            calls = min(max(1, round(ROUND_US / max(once_us, 1.0))), 1000)
            clocks.setdefault(calls, {})[case.name] = case.work
        for calls, works in clocks.items():
            taken = take_turns(works, CallClock(device, calls, wait=True), ROUNDS)
            measured |= {name: min(samples) for name, samples in taken.items()}
    return Shown(exhibit=exhibit, measured_us=measured, failed=failed)
