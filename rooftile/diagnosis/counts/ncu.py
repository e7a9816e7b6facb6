"""Reads the counters of Nsight Compute (ncu) for one warm call."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch


def show_once(work: Callable[[], object]) -> None:
    """Runs work once warm under the profiler: the program that `kernels` starts must end with this."""
    work()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    work()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def kernels(metrics: Sequence[str], module: str, *arguments: str, clocks: str) -> list[dict[str, float]]:
    """The metrics of each kernel that `python -m module arguments` shows.

    clocks: "base" holds the chip at its base clock, where power plays no part; "none" leaves it as it is when things are timed.
    """
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
    command += ["--clock-control", clocks, "--metrics", ",".join(metrics), sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ncu failed on {module} {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))
    # the first row under the header has the units
    return [{metric: float(row[metric].replace(",", "")) for metric in metrics} for row in rows[1:]]
