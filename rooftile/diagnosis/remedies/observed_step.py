"""All that is known of a step when its remedies are priced, and how its queue ends with a change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rooftile.diagnosis.records import StepCall
from rooftile.diagnosis.remedies.attentions import StepAttention
from rooftile.diagnosis.remedies.queue import LaunchChange, Queue, joined
from rooftile.diagnosis.verdicts.findings import Finding
from rooftile.diagnosis.verdicts.step import StepEvidence
from rooftile.diagnosis.watching.host_place import HostPlace
from rooftile.hardware.ceilings import Ceilings

# remedies that save less of the step than this are not worth a line
WORTH = 0.005
# a step ends with the host if the host has asked for everything after this share of it
HELD_UP = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """All that is known of a step when its remedies are priced."""

    device: torch.device
    ceilings: Ceilings
    step: StepEvidence
    findings: Sequence[Finding]  # by the rows of `calls`
    calls: Sequence[StepCall]
    kept: frozenset[int]  # tensors that outlive the step
    busy_us: float
    launches: int
    kernels: Mapping[int, Sequence[str]] = field(default_factory=dict)  # by row
    attentions: Sequence[tuple[StepAttention, Mapping[str, float], str]] = ()  # with the times of others, and the line to write
    narrower: Mapping[int, float] = field(default_factory=dict)  # by row: the share of its time that is left in bf16, measured
    too_late: frozenset[int] = frozenset()  # rows for whose run in bf16 the budget had no time
    aligned_us: Mapping[int, float] = field(default_factory=dict)  # by row: what padding to whole 16 bytes saves, measured
    queue: Queue | None = None  # a GPU's launches, at the pace of the step without a profiler
    cast_us: float = 0.0  # the host's time for one copy between dtypes
    sync_us: Mapping[str, float] = field(default_factory=dict)  # by line
    waits: Mapping[HostPlace, float] = field(default_factory=dict)  # the host's time on something else than operators
    threads: int = 1  # that compute a CPU's operators
    node_us: float = 1.5  # a kernel in a graph


def by_queue(seen: ObservedStep, queue: Queue, changes: Mapping[int, LaunchChange]) -> tuple[float, float | None]:
    """The saving of changes of rows, and the host's time if the changed step cannot be shorter than it."""
    by_key = joined(changes, [f.operation for f in seen.findings])
    saved = queue.saved_us(by_key, seen.step.time_us)
    host_us, end_us = queue.changed(by_key).run()
    return saved, host_us if host_us > HELD_UP * end_us else None
