"""Exact attention on a CPU beside PyTorch's own kernel, and the memory of a long sequence.

cpu-DTYPE-dD-MASK-LENGTH-h4     forward and backward of the automatic choice, of `tiled`, and of PyTorch's flash kernel
memory-32768-hH                 peak memory beyond the inputs, and time, of a forward and a backward, in a process of its own
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import rooftile as rt
from rooftile.cost.session import Session
from rooftile.exact.cases import Case
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row
from rooftile_lab.bench.run import Progress, words_of
from rooftile_lab.bench.run import measure as measure_case

BACKENDS = ("rooftile", "tiled", "torch-flash")


def case_of(dtype: str, dim: int, mask: str, length: int, heads: int = 4) -> Case:
    """A problem of one sequence."""
    return Case(
        name=f"cpu-{dtype}-d{dim}-{mask}-{length}-h{heads}", tags=frozenset(), B=1, T=length, S=length, H=heads, Hk=heads,
        dim=dim, dtype=dtype, mask=rt.CAUSAL if mask == "causal" else rt.FULL,
    )  # fmt: skip


TIMES = {
    case.name: case
    for length in (256, 1024, 4096)
    for dtype in ("fp32", "bf16")
    for dim in (64, 128)
    for mask in ("full", "causal")
    for case in [case_of(dtype, dim, mask, length)]
}
MEMORY = {f"memory-32768-h{heads}": case_of("fp32", 64, "causal", 32_768, heads) for heads in (1, 8)}
GPU = ()
CPU = (*TIMES, *MEMORY)
QUICK = ()


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each backend and phase."""
    for name in names:
        if name in TIMES:
            for row in measure_case(TIMES[name], BACKENDS, session=session, on_progress=say):
                yield replace(row, suite="cpu")
        else:
            for backend in ("tiled", "sdpa"):
                say(f"{name}: {backend}")
                yield memory(session, MEMORY[name], backend)


def memory(session: Session, case: Case, backend: str) -> Row:
    """Forward and backward once, in a process whose memory is looked at."""
    command = [sys.executable, "-m", __name__, backend, str(case.T), str(case.H)]
    used, us = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return timed_row(
        session, [float(us)], dtype=case.dtype, suite="cpu", case=case.name, backend=backend, ran=backend, phase="fwd+bwd",
        problem=words_of(case.problem()), peak_bytes=int(used), peak_kind="peak RSS beyond inputs",
    )  # fmt: skip


def once(backend: str, length: int, heads: int) -> tuple[int, float]:
    """The bytes of peak memory that a forward and backward add to their inputs and torch, and the µs that they take."""
    warm = torch.randn(1, 64, 1, 64, requires_grad=True)
    rt.attention(warm, warm, warm, rt.CAUSAL, backend=backend).sum().backward()
    inputs = case_of("fp32", 64, "causal", length, heads).inputs(requires_grad=True)
    # forget the peak so far: a process is born with its parent's, and importing torch leaves one
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    start = time.perf_counter()
    q, k, v = inputs.tensors
    o = rt.attention(q, k, v, inputs.mask, backend=backend)
    torch.autograd.grad(o, inputs.tensors, torch.ones_like(o))
    took = time.perf_counter() - start
    return status("VmHWM") - before, took * 1e6


def status(name: str) -> int:
    """A size of this process in bytes: VmRSS now, VmHWM at its peak (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(*once(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))  # noqa: T201
