"""The experiments on all leading operators of a step, within one budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from rooftile.diagnosis.experiments.call import operator_name
from rooftile.diagnosis.experiments.evidence import Evidence
from rooftile.diagnosis.experiments.intensity import references
from rooftile.diagnosis.experiments.intensity.growth import GROWING
from rooftile.diagnosis.experiments.intensity.references import NEEDED_S
from rooftile.diagnosis.experiments.measure import alone, with_intensity
from rooftile.diagnosis.experiments.timing import timer_for
from rooftile.diagnosis.records import Sample

Row = TypeVar("Row")
# the share of the budget for the times alone, in the cache and on less data; the rest compiles and runs kernels with more to do
ALONE = 0.4
# seconds, after which more runs of an operator change little
ALONE_S = 2.0
OFTEN = 10_000
# dtypes of passes over memory
SCALES = (torch.float32, torch.bfloat16, torch.float16)
# times that an operator is measured again whose verdict is not settled
AGAIN = 2


class Recorded(NamedTuple):
    """A recorded call, and the time of one such call in the step."""

    sample: Sample
    in_context_us: float | None


def measure_all(
    recorded: Mapping[Row, Recorded], device: torch.device, end: float, is_settled: Callable[[Row, Evidence], bool]
) -> tuple[dict[Row, Evidence], list[str]]:  # fmt: skip
    """Returns the evidence of each call, and notes about calls that cannot be run again.

    First every operator alone, in the cache and on less data; then added arithmetic, of products first, because nothing is
    compiled for them, else in the given order; then what is not settled once more, until the budget ends.

    Args:
        recorded: the calls by their names, the most expensive first.
        device: of the step. Its operators on a CPU are timed there.
        end: of the budget, on the clock of `time.perf_counter`.
        is_settled: says whether the measurements of a call are exact enough for a verdict.
    """
    from torch._dynamo import config

    # one compiled kernel serves an operator of many shapes, and is compiled again for each new relation between its sizes. The
    # program's limit of that is eight
    with config.patch({"recompile_limit": OFTEN, "accumulated_recompile_limit": OFTEN}):
        return _measured(recorded, device, end, is_settled)


def _measured(
    recorded: Mapping[Row, Recorded], device: torch.device, end: float, is_settled: Callable[[Row, Evidence], bool]
) -> tuple[dict[Row, Evidence], list[str]]:  # fmt: skip
    if not recorded:
        return {}, []
    kinds = {one.sample.operation.device for one in recorded.values()}
    # a program may be in inference mode, outside of which nothing can be written that is made in it
    with torch.inference_mode(False):
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
            notes.append(f"{sample.operation.op} could not be run again: {str(error).splitlines()[0].rstrip('.')}")
    for row in sorted(found, key=lambda row: not _grows(recorded[row].sample)):
        sample, left_s = recorded[row].sample, max(end - time.perf_counter(), 0.0)
        found[row] = with_intensity(found[row], sample, timers[sample.operation.device], left_s)
    for turn in range(1, AGAIN + 1):
        for row in found:
            longer_s = min((1 + turn) * each_s, end - time.perf_counter())
            if longer_s > 0 and not is_settled(row, found[row]):
                sample, in_context_us = recorded[row]
                found[row] = found[row].or_better(alone(sample, timers[sample.operation.device], longer_s, in_context_us))
    return found, notes


def prepare_scales(samples: Iterable[Sample], device: torch.device, budget_s: float) -> None:
    """Measures what slopes of these calls are read against, for dtypes that this machine has no scale of yet.

    It is the machine's and not the program's, so it costs no budget; with a budget that is shorter than it takes, it is left out.
    """
    if budget_s < NEEDED_S[device.type]:
        return
    passes = [sample for sample in samples if sample.operation.device == device.type and not _grows(sample)]
    dtypes = dict.fromkeys(
        x.dtype for sample in passes for x in tree_leaves((sample.args, sample.kwargs))
        if isinstance(x, torch.Tensor) and x.dtype in SCALES and x.numel() > 1
    )  # fmt: skip
    with torch.inference_mode(False), torch.enable_grad():
        references.prepare(dtypes, timer_for(device), device)


def _grows(sample: Sample) -> bool:
    return operator_name(sample.function) in GROWING
