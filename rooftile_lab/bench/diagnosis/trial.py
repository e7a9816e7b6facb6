"""Runs a public case alone, under a diagnosis, and in the experiments of its truth, each in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from rooftile.diagnosis.counts import counters, ncu
from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.errors import Unsupported
from rooftile_lab.bench.diagnosis.cases import FOLDER, Case
from rooftile_lab.bench.diagnosis.truth import UNCLEAR, Truth

PUBLIC = "rooftile_lab.bench.diagnosis.public"
# products in vectors of 128 bits, in bf16 without AMX's tiles; on a GPU fp32 products in tensor cores
BF16_WITHOUT_TILES = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
OTHER_ARITHMETIC = {
    "cpu": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "cuda": {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"},
}
# a diagnosis hangs if it takes longer than LATE times its budget and START_S together
LATE, START_S = 6.0, 150.0
RUN_S = 300.0
# all of these fit into one pass over a kernel; a second pass would save and restore a program's memory around each kernel
OF_PEAK = ".pct_of_peak_sustained_elapsed"
MEMORY = {"dram_percent": "dram__bytes.sum" + OF_PEAK, "l2_percent": "lts__t_sectors.avg" + OF_PEAK}
SM = ("sm__inst_issued.avg" + OF_PEAK, "sm__pipe_tensor_cycles_active.avg" + OF_PEAK)


@dataclass(frozen=True, slots=True)
class Timed:
    """A run of a script: a step by the wall clock and by the process's own time, and the whole process."""

    wall_us: float
    cpu_us: float
    process_s: float


def script_run(path: Path, arguments: Sequence[str], ranks: int = 1, more: Mapping[str, str] | None = None) -> Timed:
    """Runs a script of the folder, with further variables in its environment. Raises Unsupported if it fails."""
    began = time.perf_counter()
    said = _run([*_launcher(ranks), str(path), *arguments], RUN_S, more or {})
    line = next(line for line in reversed(said.splitlines()) if line.startswith("{"))
    return Timed(**json.loads(line), process_s=time.perf_counter() - began)


def truth_of(case: Case, size: str, device: str) -> tuple[Truth, Timed]:
    """Makes the experiments of a case. Returns them and the run of the program as it is."""
    clock = clock_of(device, waits=case.waits)

    def run(size: str, *, whole: bool = False, more: Mapping[str, str] | None = None) -> Timed:
        left_out = ["--without", case.without] if case.without and not whole else []
        return script_run(case.path, [*case.arguments, "--size", size, *left_out], case.ranks, more)

    alone = run(size, whole=True)
    without_us = getattr(run(size), clock) if case.without else None
    changed, factor = None, 1.0
    if device == "cuda" and shutil.which("ncu") is not None:
        counted_us = counted(case, size)
        return Truth(whole_us=getattr(alone, clock), part=case.part, without_us=without_us, counted_us=counted_us), alone
    if device == "cpu" or not (case.narrow or case.narrow_on_gpu):
        other = BF16_WITHOUT_TILES if case.narrow else OTHER_ARITHMETIC[device]
        factor = factor_of("bf16" if case.narrow else "fp32", device, other)
        changed = getattr(run(size, more=other), clock)
    truth = Truth(
        whole_us=getattr(alone, clock), tiny_us=getattr(run("tiny"), clock), part=case.part, without_us=without_us,
        arithmetic_us=changed, factor=factor, overlaps=device == "cuda",
    )  # fmt: skip
    return truth, alone


def clock_of(device: str, *, waits: bool = False) -> str:
    """Names the clock: on a CPU the process's own time, which other programs disturb less, unless it waits for others."""
    return "wall_us" if waits or device == "cuda" else "cpu_us"


def counted(case: Case, size: str) -> dict[str, float]:
    """Returns the µs of the kernels of one step by what Nsight Compute saw busy: "memory", "compute", or neither clearly.

    Raises Unsupported if the counters cannot be read.
    """
    metrics = (counters.TIME, *MEMORY.values(), *SM)
    try:
        kernels = ncu.kernels(metrics, f"{PUBLIC}.{case.script}", *case.arguments, "--size", size, "--counted", clocks="none")
    except RuntimeError as error:
        raise Unsupported(str(error).splitlines()[-1][:300]) from error
    found: dict[str, float] = {}
    for kernel in kernels:
        busy = {name: kernel[metric] for name, metric in MEMORY.items()} | {"sm_percent": max(kernel[metric] for metric in SM)}
        cause = counters.busiest(busy) or UNCLEAR
        found[cause] = found.get(cause, 0.0) + kernel[counters.TIME] / 1e3
    return found


def factor_of(dtype: str, device: str, other: Mapping[str, str]) -> float:
    """Measures how many times as long a matrix product takes in an environment with other arithmetic."""
    path, asked = FOLDER / "product.py", ["--dtype", dtype, "--size", "real" if device == "cuda" else "toy"]
    clock = clock_of(device)
    changed = script_run(path, asked, more=other)
    return float(getattr(changed, clock) / getattr(script_run(path, asked), clock))


class Settings(NamedTuple):
    """The settings of a diagnosis: its budget in seconds, the remedies that it tries, and whether counters check it."""

    budget: float
    apply: Sequence[str] = ()
    ncu: bool = False


def diagnosed(case: Case, size: str, settings: Settings) -> tuple[Diagnosis, float]:
    """Diagnoses a case as a user does. Returns what rank 0 found, and the seconds that it took."""
    budget, apply, ncu = settings
    limit = LATE * budget + START_S * (1 + len(apply) + ncu)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [*_launcher(case.ranks), "-m", "rooftile", "diagnose", str(case.path), "--budget", str(budget)]
        command += [word for name in apply for word in ("--apply", name)]
        command += ["--ncu"] * ncu
        began = time.perf_counter()
        _run([*command, "--json", str(file), "--", *case.arguments, "--size", size], limit, {})
        seconds = time.perf_counter() - began
        found: Any = json.loads(file.read_text())
        return Diagnosis.from_json(json.dumps(found["ranks"][0] if "ranks" in found else found)), seconds


def _launcher(ranks: int) -> list[str]:
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *(several if ranks > 1 else [])]


def _run(command: Sequence[str], seconds: float, more: Mapping[str, str]) -> str:
    # the other process computes with as many threads as this one
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())} | dict(more)
    # a session of its own, so that no process of torchrun or of a loader is left when it hangs
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            said, complained = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as late:
            os.killpg(process.pid, signal.SIGKILL)
            raise Unsupported(f"it had not ended after {seconds:.0f} s") from late
    if process.returncode:
        # a sentence may be wrapped
        lines = [line.strip() for line in complained.splitlines() if line.strip()] or ["no words"]
        raise Unsupported(f"exit code {process.returncode}: {' '.join(lines[-4:])[-400:]}")
    return said
