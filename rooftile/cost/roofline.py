"""The roofline: the minimum time of a problem on a machine, from its FLOPs at the matrix rate and its bytes at the copy rate.

    time = max(FLOPs / rate, compulsory bytes / bandwidth)

The larger of the two binds. Exponentials, launches and imperfect overlap add time, so real programs stay below 100 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rooftile.cost import flops, io
from rooftile.exact.spec import DTYPE_NAMES, Problem
from rooftile.hardware.chips import Rates


class Machine(Protocol):
    """A machine with known rates: measured `Ceilings`, or a datasheet's `Chip`."""

    def rates(self, dtype: str) -> Rates: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """The minimum time of a problem on one machine."""

    flops: int
    bytes_moved: int  # compulsory, through device memory
    compute_us: float
    memory_us: float

    @property
    def time_us(self) -> float:
        """The least time."""
        return max(self.compute_us, self.memory_us)

    @property
    def binds(self) -> str:
        """The limit that binds: "compute" or "memory"."""
        return "compute" if self.compute_us >= self.memory_us else "memory"

    @property
    def intensity(self) -> float:
        """FLOPs per compulsory byte."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0

    def percent(self, measured_us: float) -> float:
        """Returns the roofline time over a measured time, in %."""
        return 100 * self.time_us / measured_us


def memory_roof(traffic: io.Traffic, machine: Machine, dtype: str = "bf16") -> Roof:
    """The roofline of something that only moves bytes."""
    moved = traffic.total
    return Roof(flops=0, bytes_moved=moved, compute_us=0.0, memory_us=moved / machine.rates(dtype).bytes_per_s * 1e6)


def roof(problem: Problem, machine: Machine, phase: str = "fwd") -> Roof:
    """Computes the roofline of a problem's phase, "fwd" or "bwd" (the backward alone).

    machine: `hardware.ceilings.measure(device)` for this machine's measured ceilings, or a `Chip` of `hardware.chips`.

    Example:
        >>> roof(CASES["d128-causal-4k"].problem(), chip_named("NVIDIA H200")).binds
        'compute'
    """
    rates = machine.rates(DTYPE_NAMES[problem.spec.dtype])
    work, moved = flops.count(problem, phase), io.compulsory(problem, phase).total
    return Roof(
        flops=work,
        bytes_moved=moved,
        compute_us=work / rates.flops_per_s * 1e6,
        memory_us=moved / rates.bytes_per_s * 1e6,
    )
