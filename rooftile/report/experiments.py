"""Runs the experiments of the report, one after another. One that fails is told in words on the page; the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rooftile.report import comparison, few_bits, machine, serving, tiles, training
from rooftile.report.plan import Plan
from rooftile.report.progress import Progress


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything that the page shows. What is None has a sentence in `missing` or `failures`."""

    plan: Plan
    reproduction: dict[str, str]
    machine: machine.Machine | None = None
    comparison: comparison.Comparison | None = None
    tiling: tiles.Tiling | None = None
    few_bits: few_bits.FewBits | None = None
    training: training.Training | None = None
    serving: serving.Serving | None = None
    missing: dict[str, str] = field(default_factory=dict)  # an optional package, or what another experiment was to make
    failures: dict[str, str] = field(default_factory=dict)  # an experiment broke
    seconds: dict[str, float] = field(default_factory=dict)  # that each experiment took

    def json(self) -> dict[str, Any]:
        """The raw numbers, as plain values."""
        return {
            "reproduction": self.reproduction,
            "plan": asdict(self.plan),
            "machine": self.machine and asdict(self.machine),
            "comparison": self.comparison and asdict(self.comparison),
            "tiling": self.tiling and self.tiling.json(),
            "few_bits": self.few_bits and asdict(self.few_bits),
            "training": self.training and asdict(self.training),
            "serving": self.serving and self.serving.json(),
            "missing": self.missing,
            "failures": self.failures,
            "seconds": self.seconds,
        }


def run(plan: Plan, device: str, command: str, progress: Progress) -> Report:
    """All experiments of a plan on a torch device ("cpu", "cuda")."""
    report = Report(plan=plan, reproduction=machine.reproduction(command))
    if plan.device == "cuda":
        # Triton launches on the current device
        torch.cuda.set_device(torch.device(device).index or 0)
        # autograd's own thread takes the device here; its first matrix product would otherwise warn that it has none
        x = torch.ones((), device=device, requires_grad=True)
        (x * x).backward()

    def attempt(name: str, experiment: Callable[[], Any]) -> None:
        # the one place that catches whatever an experiment raises: a page that says what broke is worth more than none
        began = time.perf_counter()
        try:
            setattr(report, name, experiment())
        except Exception as error:
            text = " ".join(str(error).split()) or "no message"
            report.failures[name] = f"{type(error).__name__}: {text[:600]}"
        report.seconds[name] = round(time.perf_counter() - began, 2)

    def step(name: str) -> Callable[[float, str], None]:
        return lambda done, doing: progress.show(name, done, doing)

    progress.show("machine", 0.0, "measuring this machine's ceilings")
    attempt("machine", lambda: machine.survey(plan, device))
    attempt("comparison", lambda: comparison.compare(plan, device, step("comparison")))
    attempt("tiling", lambda: tiles.tile_masks(plan, device, step("tiling")))
    attempt("few_bits", lambda: few_bits.measure(plan, device, step("few_bits")))
    if find_spec("transformers") is None:
        why = "The package transformers is not installed: pip install 'rooftile[report]' adds this part."
        report.missing |= {"training": why, "serving": why}
    else:
        with TemporaryDirectory() as name:
            folder = Path(name)
            attempt("training", lambda: training.train_twice(plan.model, device, folder, step("training")))
            if report.training is None:
                report.missing["serving"] = "There is no trained model to serve: its training failed."
            else:
                attempt("serving", lambda: serving.serve(plan.serving, folder, device, step("serving")))
    progress.clear()
    return report
