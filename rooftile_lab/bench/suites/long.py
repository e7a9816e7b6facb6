"""The longest shapes: clock and power of each contestant while it runs for a second, and the chip's counters.

16,384 queries and keys in bf16, forward. `mhz` and `watts` come from nvidia-smi while nothing else runs; the counters from one
call under Nsight Compute (ncu) at the chip's base clock, where power plays no part. Without ncu there are no counters.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rooftile.cost import roof
from rooftile.cost.session import Session
from rooftile.diagnosis.counts import ncu
from rooftile.exact.cases import CASES as PROBLEMS
from rooftile.hardware.clock import Work
from rooftile_lab.bench.peers import provider_named
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row, with_measures
from rooftile_lab.bench.run import Progress

GPU = tuple(f"d{dim}-{mask}-16k" for dim in (64, 128, 256) for mask in ("full", "causal"))
CPU = ()
QUICK = ("d128-full-16k",)
PROVIDERS = ("hopper", "torch-cudnn", "fa4", "fa3")
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


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant."""
    for name in names:
        for provider in PROVIDERS:
            say(f"{name}: {provider}")
            case = PROBLEMS[name]
            reason = provider_named(provider).reason(case, session.device, False)
            named: dict[str, Any] = {"suite": "long", "case": name, "backend": provider, "phase": "fwd"}
            if reason is not None:
                yield timed_row(session, [], dtype=case.dtype, reason=f"refused: {reason}", **named)
                continue
            us, clock, power = sustained(prepared(name, provider))
            floor = roof(case.problem(session.machine.arch, needs_grad=False), session.ceilings)
            counters = counted(name, provider) if shutil.which("ncu") else {}
            yield with_measures(
                timed_row(session, [us], dtype=case.dtype, roof=floor, **named), mhz=clock, watts=power, **counters
            )


def prepared(name: str, provider: str) -> Work:
    """A contestant's call."""
    case = PROBLEMS[name]
    return provider_named(provider).prepare(case, case.inputs("cuda"))


def sustained(work: Work) -> tuple[float, float, float]:
    """µs, MHz and W of calls back to back, after a moment of warming up."""
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
    clock, power = (statistics.median(x) for x in zip(*seen, strict=True))
    return took / calls * 1e6, clock, power


def counted(name: str, provider: str) -> dict[str, float]:
    """The counters of the contestant's longest kernel, which is the attention itself."""
    kernels = ncu.kernels(tuple(COUNTERS.values()), __name__, name, provider, clocks="base")
    longest = max(kernels, key=lambda kernel: kernel[COUNTERS["cycles"]])
    return {what: longest[metric] for what, metric in COUNTERS.items()}


if __name__ == "__main__":
    # the process that ncu looks at
    ncu.show_once(prepared(sys.argv[1], sys.argv[2]))
