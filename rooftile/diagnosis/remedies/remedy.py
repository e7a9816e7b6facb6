"""A remedy, and what several of them save together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rooftile.errors import InvalidInput

CHANGES = ("nothing", "rounding", "memory")
GRAPH, BATCH, FUSE, COMPILE = "CUDA graph", "larger batch", "fuse", "compile"
ATTENTION, DTYPE, PAD, WIDER = "another attention", "narrower dtype", "pad to tiles", "wider dtype: fp32"
# remedies that remove the same fixed parts; a fused chain has fewer launches for a graph to save too, but less time for each
SAME_TIME = ({GRAPH, BATCH}, {BATCH, FUSE}, {BATCH, COMPILE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change to the program, and the time that it takes off one step."""

    name: str
    ops: tuple[int, ...] = ()  # rows of the table; none: the step as a whole
    predicted_us: float
    measured_us: float | None = None  # None until it was applied
    how: str  # the line or the command to try
    changes: str  # in the numbers: "nothing", "rounding"; or "memory", what the program keeps

    def __post_init__(self) -> None:
        if self.changes not in CHANGES:
            raise InvalidInput(f"a remedy changes {self.changes!r}; it must be one of {', '.join(CHANGES)}")

    @property
    def saving_us(self) -> float:
        """The measured saving, or the predicted one."""
        return self.predicted_us if self.measured_us is None else self.measured_us


def ranked(remedies: Iterable[Remedy | None]) -> tuple[Remedy, ...]:
    """Returns the remedies that save something or were tried, the largest prediction first."""
    worth = (r for r in remedies if r and (r.predicted_us > 0 or r.measured_us is not None))
    return tuple(sorted(worth, key=lambda r: -r.predicted_us))


def exclude_each_other(one: Remedy, other: Remedy) -> bool:
    """Returns whether two remedies take away the same time, so that their savings do not add up."""
    if set(one.ops) & set(other.ops):
        return True
    return any({one.name, other.name} == names for names in SAME_TIME)


def together(remedies: Sequence[Remedy], step_us: float) -> tuple[tuple[Remedy, float], ...]:
    """Returns the remedies to apply, largest saving first, each with what it adds to the saving of those before.

    Remedies that exclude a larger one are left out, and the sum is never more than the step.
    """
    chosen: list[tuple[Remedy, float]] = []
    left_us = step_us
    for remedy in sorted(remedies, key=lambda r: -r.saving_us):
        if remedy.saving_us <= 0 or any(exclude_each_other(remedy, taken) for taken, _ in chosen):
            continue
        adds_us = min(remedy.saving_us, left_us)
        if adds_us > 0:
            chosen.append((remedy, adds_us))
            left_us -= adds_us
    return tuple(chosen)
