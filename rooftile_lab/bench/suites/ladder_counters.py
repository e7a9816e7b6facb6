"""The chip's counters for every rung of the ladder, by Nsight Compute (ncu): a row for each.

A case is a mask and a rung. Each rung is run once, warm. A share of a peak is the mean over the rung's kernels, weighted by their
time. `stall_REASON` counts the warps that could not issue for that reason, on average over the cycles in which one issued; the
four largest are kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from itertools import product

from rooftile.cost.session import Session
from rooftile.diagnosis.counts import ncu
from rooftile_lab.bench.ladder import RUNGS
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.suites import ladder

# the problem and the rung of each case
CASES = {f"{case.split('-')[1]}-{rung}": (case, rung) for case, rung in product(ladder.GPU, RUNGS)}
GPU = tuple(CASES)
CPU = ()
QUICK = ("full-flash-2", "full-hopper")

TIME, BYTES = "gpu__time_duration.sum", "dram__bytes.sum"
SHARES = {
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    "exp": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
REASONS = (
    "barrier", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard", "math_pipe_throttle", "membar",
    "mio_throttle", "no_instruction", "not_selected", "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each rung; without ncu it has a reason."""
    for name in names:
        say(name)
        case, rung = CASES[name]
        reason = "" if shutil.which("ncu") else "refused: Nsight Compute (ncu) is not on the PATH"
        row = timed_row(session, [], suite="ladder-counters", case=case, backend=rung, phase="fwd", reason=reason)
        yield row if reason else with_measures(row, **counted(case, rung))


def counted(case: str, rung: str) -> dict[str, float]:
    """The counters of a rung's kernels."""
    metrics = [TIME, BYTES, *SHARES.values(), *(STALL.format(reason) for reason in REASONS)]
    kernels = ncu.kernels(metrics, ladder.__name__, case, rung, clocks="none")
    time = sum(kernel[TIME] for kernel in kernels)

    def mean(metric: str) -> float:
        return round(sum(kernel[TIME] * kernel[metric] for kernel in kernels) / time, 2)

    stalls = sorted(((mean(STALL.format(reason)), reason) for reason in REASONS), reverse=True)
    measures: dict[str, float] = {"kernels": len(kernels), "kernels_us": round(time / 1e3, 1)}
    measures |= {"dram_mb": round(sum(kernel[BYTES] for kernel in kernels) / 1e6, 1)}
    measures |= {f"{name}_percent": mean(metric) for name, metric in SHARES.items()}
    return measures | {f"stall_{reason}": warps for warps, reason in stalls[:4]}
