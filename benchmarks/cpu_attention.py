"""CPU numbers of exact attention beside torch's own kernel, and the memory of a long sequence.

    PYTHONPATH=. python benchmarks/cpu_attention.py times 256 1024     one line per case, backend and phase
    PYTHONPATH=. python benchmarks/cpu_attention.py memory 32768       peak RSS beyond the inputs, in a process of its own

Both append to benchmarks/results/cpu.jsonl. "rooftile" is the automatic choice; ratios to "torch-flash" are of the same run.
"""

# ruff: noqa: T201 - what it prints is what it is for
from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch

import rooftile as rt
from rooftile.bench.results import Row, append
from rooftile.bench.run import measure, open_session
from rooftile.cases import Case

RESULTS = "benchmarks/results/cpu.jsonl"
BACKENDS = ("rooftile", "tiled", "torch-flash")


def case_of(dtype: str, dim: int, causal: bool, length: int, heads: int = 4) -> Case:
    name = f"cpu-{dtype}-d{dim}-{'causal' if causal else 'full'}-{length}-h{heads}"
    mask = rt.CAUSAL if causal else rt.FULL
    return Case(
        name=name, tags=frozenset(), B=1, T=length, S=length, H=heads, Hk=heads, dim=dim, dtype=dtype, mask=mask
    )


def times(lengths: list[int]) -> None:
    session = open_session()
    for length, dtype, dim, causal in product(lengths, ("fp32", "bf16"), (64, 128), (False, True)):
        rows = measure(case_of(dtype, dim, causal, length), BACKENDS, session=session)
        append(RESULTS, (row.json() for row in rows))
        due = {row.phase: row.median_us for row in rows if row.backend == "torch-flash"}
        for row in rows:
            ratio = row.median_us / due[row.phase] if row.median_us and due[row.phase] else float("nan")
            print(
                f"{row.case:30} {row.backend:12} {row.phase} {row.median_us} us  x{ratio:.2f} {row.reason}", flush=True
            )


def memory(length: int) -> None:
    for backend, heads in product(("tiled", "sdpa"), (1, 8)):
        command = [sys.executable, __file__, "one", backend, str(length), str(heads)]
        used, us = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        session = open_session()
        case = case_of("fp32", 64, True, length, heads)
        # the machine's words come from a short case; its figures are replaced by those of this process
        like = measure(case_of("fp32", 64, True, 64), ("rooftile",), ("bwd",), rounds=1, check=False, session=session)[
            0
        ]
        blank = dict.fromkeys(("low_us", "high_us", "tflops", "gbs", "roofline_percent", "error"))
        row = replace(
            like, case=case.name, backend=backend, ran=backend, phase="fwd+bwd", problem=str(case.problem().spec),
            median_us=float(us), samples=1, peak_bytes=int(used), peak_kind="peak RSS beyond inputs", **blank,
        )  # fmt: skip
        append(RESULTS, [Row(**asdict(row)).json()])
        print(f"{case.name} {backend}: {int(used) / 2**20:.0f} MiB beyond inputs, {float(us) / 1e6:.1f} s", flush=True)


def one(backend: str, length: int, heads: int) -> None:
    """Prints the bytes of peak RSS that a forward and backward add to what its inputs and torch take, and its time."""
    warm = torch.randn(1, 64, 1, 64, requires_grad=True)
    rt.attention(warm, warm, warm, rt.CAUSAL, backend=backend).sum().backward()
    inputs = case_of("fp32", 64, True, length, heads).inputs(requires_grad=True)
    # forget the peak so far: a process is born with its parent's, and importing torch leaves one
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    start = time.perf_counter()
    o = rt.attention(*inputs.tensors, inputs.mask, backend=backend)
    torch.autograd.grad(o, inputs.tensors, torch.ones_like(o))
    took = time.perf_counter() - start
    print(status("VmHWM") - before, took * 1e6)


def status(name: str) -> int:
    """A size of this process in bytes: VmRSS now, VmHWM at its peak (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "times":
        times([int(word) for word in words])
    elif what == "memory":
        memory(int(words[0]))
    else:
        one(words[0], int(words[1]), int(words[2]))
