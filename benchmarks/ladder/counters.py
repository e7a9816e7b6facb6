"""What the chip's counters say of every rung of the ladder: a JSON line a rung. Needs Nsight Compute (ncu).

    PYTHONPATH=. python -m benchmarks.ladder.counters COMMIT [RUNG ...] >> benchmarks/results/h200-ladder-counters.jsonl

One warm run of each rung, all its kernels; shares of a peak are means over the kernels by their time. A stall is a reason for
which warps, on average over a cycle in which one issues, could not.
"""

# ruff: noqa: T201 - what it prints is what it is for
from __future__ import annotations

import json
import sys
from datetime import UTC, datetime

import torch

from benchmarks import ncu
from benchmarks.ladder.run import RUNGS

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


def found(rung: str, causal: bool) -> dict[str, object]:
    metrics = [TIME, BYTES, *SHARES.values(), *(STALL.format(reason) for reason in REASONS)]
    arguments = ("--once", rung, *(["causal"] if causal else []))
    kernels = ncu.kernels(metrics, "benchmarks.ladder.run", *arguments, clocks="none")
    time = sum(kernel[TIME] for kernel in kernels)

    def mean(metric: str) -> float:
        return round(sum(kernel[TIME] * kernel[metric] for kernel in kernels) / time, 2)

    stalls = {reason: mean(STALL.format(reason)) for reason in REASONS}
    return {
        "rung": rung,
        "mask": "causal" if causal else "full",
        "kernels": len(kernels),
        "us": round(time / 1e3, 1),
        "dram_mb": round(sum(kernel[BYTES] for kernel in kernels) / 1e6, 1),
        **{f"{name}_percent": mean(metric) for name, metric in SHARES.items()},
        "stalls": dict(sorted(stalls.items(), key=lambda item: -item[1])[:4]),
    }


def main(commit: str, rungs: tuple[str, ...]) -> None:
    about = {"device": torch.cuda.get_device_name(), "commit": commit, "date": datetime.now(UTC).isoformat()}
    for causal in (False, True):
        for rung in rungs:
            print(json.dumps(found(rung, causal) | about), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "unknown", tuple(sys.argv[2:]) or RUNGS)
