"""Reads the chip's counters for every rung of the ladder: a row for each rung, as a JSON line. Needs Nsight Compute (ncu).

    PYTHONPATH=. python -m rooftile_lab.programs.ladder.counters [RUNG ...] >> benchmarks/results/h200-ladder-counters.jsonl

Each rung is run once, warm. A share of a peak is the mean over the rung's kernels, weighted by their time. `stall_REASON` counts
the warps that could not issue for that reason, on average over the cycles in which one issued; the four largest are kept.
"""

from __future__ import annotations

import sys

import torch

from rooftile.cost.session import Session, open_session
from rooftile.diagnosis.counts import ncu
from rooftile_lab.bench.results import Row
from rooftile_lab.programs.ladder.run import RUNGS, case_of

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


def counted(session: Session, rung: str, causal: bool) -> Row:
    metrics = [TIME, BYTES, *SHARES.values(), *(STALL.format(reason) for reason in REASONS)]
    arguments = ("--once", rung, *(["causal"] if causal else []))
    kernels = ncu.kernels(metrics, "rooftile_lab.programs.ladder.run", *arguments, clocks="none")
    time = sum(kernel[TIME] for kernel in kernels)

    def mean(metric: str) -> float:
        return round(sum(kernel[TIME] * kernel[metric] for kernel in kernels) / time, 2)

    stalls = sorted(((mean(STALL.format(reason)), reason) for reason in REASONS), reverse=True)
    measures = {"kernels": len(kernels), "kernels_us": round(time / 1e3, 1)}
    measures |= {"dram_mb": round(sum(kernel[BYTES] for kernel in kernels) / 1e6, 1)}
    measures |= {f"{name}_percent": mean(metric) for name, metric in SHARES.items()}
    measures |= {f"stall_{reason}": warps for warps, reason in stalls[:4]}
    return Row(
        suite="ladder-counters", case=case_of(causal).name, backend=rung, phase="fwd", measures=measures, **session.about("bf16")
    )


def main(rungs: tuple[str, ...]) -> None:
    session = open_session(torch.device("cuda"))
    for causal in (False, True):
        for rung in rungs:
            print(counted(session, rung, causal).json(), flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or RUNGS)
