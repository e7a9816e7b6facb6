"""Runs the experiments of the report, one after another. If one fails, the page says so, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rooftile.hardware import ceilings, load
from rooftile_lab.bench.threads import one_thread
from rooftile_lab.report import (
    approximate,
    comparison,
    diagnosis,
    formats,
    machine,
    precision,
    probe,
    recall,
    serving,
    studies,
    tiles,
    training,
    weights,
)
from rooftile_lab.report.plan import Plan
from rooftile_lab.report.precision import PrecisionErrors
from rooftile_lab.report.progress import Progress
from rooftile_lab.report.spread import usual


@dataclass(slots=True, kw_only=True)
class Report:
    """The content of the page. A field that is None has a sentence in `missing` or `failures`."""

    plan: Plan
    reproduction: dict[str, str]
    machine: machine.Machine | None = None
    comparison: comparison.Comparison | None = None
    tiling: tiles.Tiling | None = None
    precision: PrecisionErrors | None = None
    approximate: approximate.Approximate | None = None
    training: training.Training | None = None
    serving: serving.Serving | None = None
    weights: weights.Weights | None = None
    formats: formats.Formats | None = None
    diagnosis: diagnosis.Diagnosed | None = None
    recall: recall.Recall | None = None
    context: studies.Study | None = None
    experts: studies.Study | None = None
    histories: studies.Study | None = None
    missing: dict[str, str] = field(default_factory=dict)  # an optional package, or the result of another experiment, is missing
    failures: dict[str, str] = field(default_factory=dict)  # an experiment failed
    seconds: dict[str, float] = field(default_factory=dict)  # the time of each experiment
    cpu_seconds: dict[str, float] = field(default_factory=dict)  # ... and this process's own time in it
    others: dict[str, float] = field(default_factory=dict)  # cores that other programs kept busy during each, where known
    before: probe.Probe | None = None

    @property
    def spread(self) -> float:
        """The usual spread of the run's times, as in `rooftile_lab.report.spread`."""
        found = self.comparison.spreads if self.comparison else []
        for one in self.tiling.maps if self.tiling else ():
            found += [one.forward_spread, one.sdpa_spread]
        return usual(found)

    @property
    def busy(self) -> float | None:
        """Cores that other programs kept busy over the whole run; None where that is unknown."""
        wall = sum(self.seconds[name] for name in self.others)
        return sum(cores * self.seconds[name] for name, cores in self.others.items()) / wall if wall else None

    def json(self) -> dict[str, Any]:
        """Returns the raw numbers as plain values."""
        return {
            "reproduction": self.reproduction,
            "plan": asdict(self.plan),
            "machine": self.machine and asdict(self.machine),
            "comparison": self.comparison and asdict(self.comparison),
            "tiling": self.tiling and self.tiling.json(),
            "precision": self.precision and asdict(self.precision),
            "approximate": self.approximate and self.approximate.json(),
            "training": self.training and asdict(self.training),
            "serving": self.serving and self.serving.json(),
            "weights": self.weights and asdict(self.weights),
            "formats": self.formats and asdict(self.formats),
            "diagnosis": self.diagnosis and self.diagnosis.json(),
            "recall": self.recall and self.recall.json(),
            "context": self.context and self.context.json(),
            "experts": self.experts and self.experts.json(),
            "histories": self.histories and self.histories.json(),
            "missing": self.missing,
            "failures": self.failures,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "others": self.others,
            "before": self.before and asdict(self.before),
        }


def run(plan: Plan, device: str, command: str, progress: Progress) -> Report:
    """Runs all experiments of a plan on a torch device ("cpu", "cuda")."""
    report = Report(plan=plan, reproduction=machine.reproduction(command))
    if plan.device == "cuda":
        # Triton launches on the current device
        torch.cuda.set_device(torch.device(device).index or 0)
        # set the device in autograd's thread, whose first matrix product would otherwise warn that no device is set
        x = torch.ones((), device=device, requires_grad=True)
        (x * x).backward()

    with one_thread(torch.device(plan.device)):
        report.before = probe.probe(torch.device(device))
        progress.expect(report.before)
        _run_all(report, plan, device, progress)
        if report.machine is not None:
            _settle(report, report.machine, device)
    progress.clear()
    return report


def _settle(report: Report, found: machine.Machine, device: str) -> None:
    """Puts the highest ceilings that the run has seen under everything that is drawn beneath them."""
    report.machine, final = machine.settled(found, ceilings.measure(device))
    if report.weights is not None:
        lines = weights.rooflines(report.plan, final, report.weights.size)
        report.weights = replace(report.weights, rooflines=lines)
    if report.formats is not None:
        report.formats = replace(report.formats, planned=replace(report.formats.planned, ceilings=final.json()))


def _run_all(report: Report, plan: Plan, device: str, progress: Progress) -> None:
    """Runs the experiments one after another, and files results and failures in the report."""

    def attempt(name: str, experiment: Callable[[], Any]) -> None:
        # the only place that catches any exception: a page that names the failure is better than no page
        began, own, meter = time.perf_counter(), time.process_time(), load.Meter()
        try:
            setattr(report, name, experiment())
        except Exception as error:
            text = " ".join(str(error).split()) or "no message"
            report.failures[name] = f"{type(error).__name__}: {text[:600]}"
        report.seconds[name] = round(time.perf_counter() - began, 2)
        report.cpu_seconds[name] = round(time.process_time() - own, 2)
        if (others := meter.others()) is not None:
            report.others[name] = others
        progress.done(name, report.seconds[name])

    def step(name: str) -> Callable[[float, str], None]:
        return lambda done, doing: progress.show(name, done, doing)

    progress.show("machine", 0.0, "measuring this machine's ceilings")
    attempt("machine", lambda: machine.survey(plan, device))
    attempt("comparison", lambda: comparison.compare(plan, device, step("comparison")))
    attempt("tiling", lambda: tiles.tile_masks(plan, device, step("tiling")))
    attempt("precision", lambda: precision.measure(plan, device, step("precision")))
    attempt("approximate", lambda: approximate.measure(plan, device, step("approximate")))
    if find_spec("transformers") is None:
        why = "The package transformers is not installed; pip install transformers adds this part."
        report.missing |= {"training": why, "serving": why, "weights": why}
        attempt("diagnosis", lambda: diagnosis.diagnose_all(plan, device, None, step("diagnosis")))
    else:
        with TemporaryDirectory() as name:
            folder = Path(name)
            attempt("training", lambda: training.train_twice(plan.model, device, folder, step("training")))
            if report.training is None:
                report.missing["serving"] = "There is no trained model to serve: its training failed."
                report.missing["weights"] = "There is no trained model to weigh: its training failed."
            else:
                attempt("serving", lambda: serving.serve(plan.serving, folder, device, step("serving")))
                attempt("weights", lambda: weights.measure(plan, folder, device, step("weights")))
            trained = folder if report.training is not None else None
            attempt("diagnosis", lambda: diagnosis.diagnose_all(plan, device, trained, step("diagnosis")))
    attempt("formats", lambda: formats.measure(plan, device, step("formats")))
    attempt("recall", lambda: recall.measure(plan, device, step("recall")))
    attempt("context", lambda: studies.contexts(plan, device, step("context")))
    attempt("experts", lambda: studies.experts(plan, device, step("experts")))
    attempt("histories", lambda: studies.histories(plan, device, step("histories")))
