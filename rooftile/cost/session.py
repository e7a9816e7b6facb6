"""The facts that all rows of one run share: the machine, its ceilings, the commit, and the time at which the run began."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rooftile.cost import Roof
from rooftile.hardware import ceilings
from rooftile.hardware.ceilings import Ceilings
from rooftile.hardware.device import Device, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The machine, the software and the run that a row belongs to. Lines that were converted may lack some of it."""

    device: str
    arch: str = ""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    commit: str
    date: str  # when the run began: the same for all lines of a run
    copy_gbs: float | None = None  # the ceilings that percentages refer to
    matmul_tflops: float | None = None


@dataclass(slots=True)
class Session:
    """One run. Rows of one session share their date, and only such rows are compared."""

    device: torch.device
    machine: Device
    ceilings: Ceilings
    commit: str
    date: str
    again: Ceilings | None = None  # measured during the run, because a time was shorter than `ceilings` allow

    @property
    def known(self) -> Ceilings:
        """The ceilings that count: the highest that this run has seen."""
        return self.again or self.ceilings

    @property
    def dtype(self) -> str:
        """The dtype in which models run here: "bf16" on a GPU, "fp32" on a CPU."""
        return "bf16" if self.device.type == "cuda" else "fp32"

    def about(self, dtype: str) -> dict[str, Any]:
        """The fields of `About`, with the matrix-product ceiling of a dtype."""
        machine, known = self.machine, self.known
        about = About(
            device=machine.name, arch=machine.arch, driver=machine.driver, torch=machine.torch, triton=machine.triton,
            commit=self.commit, date=self.date, copy_gbs=known.copy_gbs, matmul_tflops=known.matmul_tflops.get(dtype),
        )  # fmt: skip
        return asdict(about)

    def checked(self, roof: Roof, dtype: str, time_us: float) -> Roof:
        """Returns the roof for a time that was measured.

        A time below its roof means that the ceilings were measured on a busier or hotter machine. Then they are measured again,
        once per run, and of each ceiling the higher measurement counts from there on.
        """
        if self.again is None and roof.percent(time_us) > 100:
            self.again = ceilings.higher(self.ceilings, ceilings.measure(self.device, refresh=True))
        if self.again is None:
            return roof
        rate, before = (of.matmul_tflops.get(dtype, 1.0) for of in (self.again, self.ceilings))
        memory_us = roof.memory_us * self.ceilings.copy_gbs / self.again.copy_gbs
        return replace(roof, compute_us=roof.compute_us * before / rate, memory_us=memory_us)


def open_session(
    device: torch.device | str = "cpu", *, refresh: bool = False, say: Callable[[str], None] | None = None
) -> Session:
    """Describes the machine and takes its ceilings: from the cache, or measured now with `refresh`.

    say: is called with words about each step, if something is measured.
    """
    device = torch.device(device)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Session(device, describe(device), ceilings.measure(device, refresh=refresh, say=say), commit(), date)


def commit() -> str:
    """The environment variable ROOFTILE_COMMIT, else the commit of the checkout that this code runs from, else "unknown".

    A "+" after the checkout's commit says that tracked files have changed since.
    """
    if given := os.environ.get("ROOFTILE_COMMIT"):
        return given
    folder = Path(__file__).parents[2]
    if (folder / ".git").exists() and shutil.which("git") is not None:
        asked = [
            subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False).stdout.strip()
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
        if asked[0]:
            return asked[0] + "+" * bool(asked[1])
    return "unknown"
