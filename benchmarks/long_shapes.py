"""What holds the longest shapes: clock and power of each contestant while it runs for a second, and what the counters say.

    PYTHONPATH=. python -m benchmarks.long_shapes COMMIT [CASE ...] >> benchmarks/results/h200-long-shapes.jsonl

16,384 queries and keys, bf16, forward. Clock and power come from nvidia-smi while nothing else runs; the counters from one run
under Nsight Compute (ncu) at its base clock, where power plays no part: cycles, instructions of a warp, bytes that shared memory
hands out, bytes out of L2, and the share of cycles in which the tensor cores work. ncu missing: no counters.
"""

# ruff: noqa: T201 - what it prints is what it is for
from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch

from benchmarks.ladder import ncu
from rooftile.bench.peers import provider_named
from rooftile.cases import CASES
from rooftile.cost import flops

NAMES = tuple(f"d{dim}-{mask}-16k" for dim in (64, 128, 256) for mask in ("full", "causal"))
PROVIDERS = ("hopper", "torch-cudnn", "fa4")
SECONDS = 1.2
COUNTERS = {
    "cycles": "sm__cycles_active.avg",
    "instructions": "smsp__inst_executed.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "shared_percent": "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",
    "l2_bytes": "lts__t_bytes.sum",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exp_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
}


def prepared(name: str, provider: str) -> Callable[[], object] | None:
    case, device = CASES[name], torch.device("cuda")
    found = provider_named(provider)
    if reason := found.reason(case, device, False):
        print(f"{provider}: {reason}", file=sys.stderr)
        return None
    return found.prepare(case, case.inputs(device))


def sustained(name: str, work: Callable[[], object]) -> dict[str, float]:
    """TFLOP/s, MHz and W, of back-to-back calls after a moment of warming."""
    work()
    torch.cuda.synchronize()
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits", "-lms", "50"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch, torch.no_grad():
        try:
            calls, start = 0, time.perf_counter()
            while time.perf_counter() - start < SECONDS:
                for _ in range(10):
                    work()
                torch.cuda.synchronize()
                calls += 10
            took = time.perf_counter() - start
        finally:
            # it would report for ever, and leaving the block waits for it
            watch.terminate()
        lines = watch.communicate()[0].splitlines()
    seen = [[float(x) for x in line.split(",")] for line in lines[len(lines) // 2 :] if line.count(",") == 1]
    count = flops.count(CASES[name].problem("sm90"), "fwd")
    clock, power = (round(statistics.median(x), 1) for x in zip(*seen, strict=True))
    return {"tflops": round(count * calls / took / 1e12, 1), "mhz": clock, "watts": power}


def counted(name: str, provider: str) -> dict[str, float]:
    kernels = ncu.kernels(tuple(COUNTERS.values()), "benchmarks.long_shapes", "--once", name, provider, clocks="base")
    # the longest kernel is the attention itself
    longest = max(kernels, key=lambda kernel: kernel[COUNTERS["cycles"]])
    return {what: longest[metric] for what, metric in COUNTERS.items()}


def once(name: str, provider: str) -> None:
    work = prepared(name, provider)
    if work is None:
        raise SystemExit(1)
    ncu.show_once(work)


def main(commit: str, names: tuple[str, ...]) -> None:
    about: dict[str, Any] = {"device": torch.cuda.get_device_name(), "commit": commit}
    about["date"] = datetime.now(UTC).isoformat()
    for name in names:
        for provider in PROVIDERS:
            work = prepared(name, provider)
            if work is None:
                continue
            row: dict[str, Any] = {"case": name, "provider": provider} | sustained(name, work)
            if shutil.which("ncu"):
                row |= counted(name, provider)
            print(json.dumps(row | about), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(*sys.argv[2:4])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "unknown", tuple(sys.argv[2:]) or NAMES)
