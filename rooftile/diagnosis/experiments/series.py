"""The experiments on all leading operators of a step, within one budget."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch

from rooftile.diagnosis.experiments.evidence import Evidence
from rooftile.diagnosis.experiments.measure import alone, with_intensity
from rooftile.diagnosis.experiments.timing import timer_for
from rooftile.diagnosis.records import Sample

Row = TypeVar("Row")
# the share of the budget for the times alone, in the cache and on less data; the rest compiles and runs kernels with more to do
ALONE = 0.4
# seconds, after which more runs of an operator change little
ALONE_S = 2.0


class Recorded(NamedTuple):
    """A recorded call, and the time of one such call in the step."""

    sample: Sample
    in_context_us: float | None


def measure_all(recorded: Mapping[Row, Recorded], device: torch.device, end: float) -> tuple[dict[Row, Evidence], list[str]]:
    """Returns the evidence of each call, and notes about those that cannot be run again.

    First every operator alone, in the cache and on less data; then added arithmetic, in the given order, until the budget ends.

    Args:
        recorded: the calls by their names, the most expensive first.
        device: of the step. Its operators on a CPU are timed there.
        end: of the budget, on the clock of `time.perf_counter`.
    """
    if not recorded:
        return {}, []
    kinds = {one.sample.operation.device for one in recorded.values()}
    timers = {kind: timer_for(device if kind == device.type else torch.device("cpu")) for kind in kinds}
    found: dict[Row, Evidence] = {}
    notes: list[str] = []
    each_s = min(ALONE_S, ALONE * (end - time.perf_counter()) / len(recorded))
    for row, (sample, in_context_us) in recorded.items():
        if found and time.perf_counter() > end:
            break
        try:
            found[row] = alone(sample, timers[sample.operation.device], each_s, in_context_us)
        except (RuntimeError, NotImplementedError) as error:
            notes.append(f"{sample.operation.op} could not be run again: {str(error).splitlines()[0]}")
    for row in found:
        sample, left_s = recorded[row].sample, max(end - time.perf_counter(), 0.0)
        found[row] = with_intensity(found[row], sample, timers[sample.operation.device], left_s)
    return found, notes
