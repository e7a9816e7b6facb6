"""The experiments on all leading operators of a step, within one budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from rooftile.diagnosis.experiments.call import operator_name
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.experiments.evidence import Evidence
from rooftile.diagnosis.experiments.intensity import references
from rooftile.diagnosis.experiments.intensity.growth import GROWING
from rooftile.diagnosis.experiments.intensity.references import NEEDED_S
from rooftile.diagnosis.experiments.measure import ALL_RUNS, TIMED_RUNS, alone, with_intensity
from rooftile.diagnosis.experiments.timing import timer_for
from rooftile.diagnosis.output.units import duration
from rooftile.diagnosis.records import Sample
from rooftile.errors import Unsupported

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
    recorded: Mapping[Row, Recorded], device: torch.device, deadline: Deadline, is_settled: Callable[[Row, Evidence], bool]
) -> tuple[dict[Row, Evidence], list[str]]:  # fmt: skip
    """Returns the evidence of each call, and notes about calls that cannot be run again, or not in time.

    First every operator alone, in the cache and on less data; then added arithmetic: of products first, because nothing is
    compiled for them, then of operators that need it for a verdict, else in the given order; then what is not settled once more,
    until the budget ends.

    Args:
        recorded: the calls by their names, the most expensive first.
        device: of the step. Its operators on a CPU are timed there.
        deadline: of all of it.
        is_settled: says whether the measurements of a call are exact enough for a verdict.
    """
    from torch._dynamo import config

    # one compiled kernel serves an operator of many shapes, and is compiled again for each new relation between its sizes. The
    # program's limit of that is eight
    with config.patch({"recompile_limit": OFTEN, "accumulated_recompile_limit": OFTEN}):
        return _measured(recorded, device, deadline, is_settled)


def _measured(
    recorded: Mapping[Row, Recorded], device: torch.device, deadline: Deadline, is_settled: Callable[[Row, Evidence], bool]
) -> tuple[dict[Row, Evidence], list[str]]:  # fmt: skip
    if not recorded:
        return {}, []
    kinds = {one.sample.operation.device for one in recorded.values()}
    # a program may be in inference mode, outside of which nothing can be written that is made in it
    left_s = deadline.left_s
    with torch.inference_mode(False):
        timers = {kind: timer_for(device if kind == device.type else torch.device("cpu")) for kind in kinds}
    # half a gigabyte to write between cold runs is the machine's matter, too
    deadline = Deadline(left_s)
    found: dict[Row, Evidence] = {}
    notes: list[str] = []
    late: list[Recorded] = []
    each_s = min(ALONE_S, ALONE * deadline.left_s / len(recorded))
    for row, one in recorded.items():
        sample, in_context_us = one
        try:
            expected_s = TIMED_RUNS * (in_context_us or 0.0) / 1e6
            # one operator is run in any case, if it is short
            (deadline.check if found else deadline.check_rest)(expected_s)
            found[row] = alone(sample, timers[sample.operation.device], each_s, in_context_us, deadline)
        except Unsupported:
            late.append(one)
        except (RuntimeError, NotImplementedError) as error:
            notes.append(f"{sample.operation.op} could not be run again: {str(error).splitlines()[0].rstrip('.')}")
    for row in sorted(found, key=lambda row: (not _grows(recorded[row].sample), is_settled(row, found[row]))):
        sample = recorded[row].sample
        found[row] = with_intensity(found[row], sample, timers[sample.operation.device], deadline)
    for turn in range(1, AGAIN + 1):
        for row in found:
            # with less time than the first measurement had, a second one would not be the better one
            if deadline.allows(max(each_s, ALL_RUNS * found[row].time_us / 1e6)) and not is_settled(row, found[row]):
                sample, in_context_us = recorded[row]
                longer_s = min((1 + turn) * each_s, deadline.left_s)
                found[row] = found[row].or_better(
                    alone(sample, timers[sample.operation.device], longer_s, in_context_us, deadline)
                )
    return found, notes + _too_late(late)


def _too_late(late: Sequence[Recorded]) -> list[str]:
    """Returns a note about the calls that were not run alone, if there are any."""
    if not late:
        return []
    names = list(dict.fromkeys(operator_name(one.sample.function) for one in late))
    their = f"{len(late)} kind{'s' * (len(late) > 1)} of operator ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
    longest_us = max(one.in_context_us or 0.0 for one in late)
    return [
        f"{their}, whose calls take up to {duration(longest_us)}, had no experiment in the budget: a larger --budget has more"
    ]


def prepare_scales(
    samples: Iterable[Sample], device: torch.device, budget_s: float, say: Callable[[str], None]
) -> None:  # fmt: skip
    """Measures what slopes of these calls are read against, for dtypes that this machine has no scale of yet.

    It is the machine's and not the program's, so it costs no budget; with a budget that is shorter than it takes, it is left out.
    say: is called with words about each that is measured.
    """
    if budget_s < NEEDED_S[device.type]:
        return
    passes = [sample for sample in samples if sample.operation.device == device.type and not _grows(sample)]
    dtypes = dict.fromkeys(
        x.dtype for sample in passes for x in tree_leaves((sample.args, sample.kwargs))
        if isinstance(x, torch.Tensor) and x.dtype in SCALES and x.numel() > 1
    )  # fmt: skip
    with torch.inference_mode(False), torch.enable_grad():
        references.prepare(dtypes, timer_for(device), device, say)


def _grows(sample: Sample) -> bool:
    return operator_name(sample.function) in GROWING
