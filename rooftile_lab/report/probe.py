"""How long the report will take here: a short piece of its own work, timed beside the load that other programs put on the machine."""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass

import torch

from rooftile.drawing.units import SPACE
from rooftile.hardware import load
from rooftile.hardware.device import describe

# the probe's time on the machine on which the plans' seconds were taken, one idle core of an Intel Xeon of 2023
REFERENCE_S = 0.075
# about half of a plan's time goes by the clock (budgets and limits), and takes no longer on a slower machine
CLOCKED = 0.5
# products, passes over memory and small operators, as the experiments have them
PRODUCTS, PASSES, SMALL = 12, 16, 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Holds what was found before the experiments.

    Args:
        slower: this machine's time over the time of the plans' machine, with its load.
        others: cores that other programs kept busy meanwhile; None where that is unknown.
        cores: that this process may use.
    """

    slower: float
    others: float | None
    cores: int
    gpu_percent: float | None = None  # how busy the GPU was before the experiments; None on a CPU, and where it is unknown

    @property
    def load(self) -> str:
        """Says how busy other programs kept the machine."""
        gpu = "" if self.gpu_percent is None else f", and the GPU was {self.gpu_percent:.0f} % busy"
        return f"{load.words(self.others, self.cores)}{gpu}"

    def expected_s(self, seconds: dict[str, float]) -> float:
        """Returns the time that experiments will take here, from the plan's times."""
        return self.slower * sum(seconds.values())

    def words(self, seconds: dict[str, float]) -> str:
        """Says how long it will take, and why."""
        return f"this takes about {minutes(self.expected_s(seconds))} here, as a probe of a second says; {self.load}"


def probe(device: torch.device) -> Probe:
    """Runs the probe, on one core: a second or two. On a GPU, whose host compiles and launches, the host counts too."""
    on_gpu, meter = device.type == "cuda", load.Meter()
    busy = gpu_percent(describe(device).uuid) if on_gpu else None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        taken = min(_work() for _ in range(2)) if on_gpu else sum(_work() for _ in range(3)) / 3
    finally:
        torch.set_num_threads(threads)
    slower = CLOCKED + (1 - CLOCKED) * taken / REFERENCE_S
    return Probe(slower=round(slower, 2), others=meter.others(), cores=load.cores(), gpu_percent=busy)


def gpu_percent(uuid: str) -> float | None:
    """Returns how busy a GPU is now, in percent, as nvidia-smi says it; None where that is unknown.

    It tells of other programs only while this one gives the GPU nothing to do.
    """
    program = shutil.which("nvidia-smi")
    if program is None or not uuid:
        return None
    # torch writes the id without the word
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    command = [program, f"--id={name}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    output = done.stdout.strip()
    return float(output) if done.returncode == 0 and output.replace(".", "", 1).isdigit() else None


def minutes(seconds: float) -> str:
    """Formats a time to wait.

    >>> minutes(20), minutes(95), minutes(1500)
    ('20\\xa0seconds', '2\\xa0minutes', '25\\xa0minutes')
    """
    if seconds < 55:
        return f"{max(round(seconds / 5) * 5, 5)}{SPACE}seconds"
    whole = round(seconds / 60)
    return f"{whole}{SPACE}minute{'s' * (whole > 1)}"


def _work() -> float:
    """Returns the time of a piece of work."""
    a, long, small = torch.rand(512, 512), torch.rand(1 << 21), torch.rand(16)
    began = time.perf_counter()
    for _ in range(PRODUCTS):
        a = (a @ a).clamp_(0.0, 1.0)
    for _ in range(PASSES):
        long = long * 1.0001
    for _ in range(SMALL):
        small.add_(1.0)
    return time.perf_counter() - began
