"""The experiment on recall: two or three methods trained small here, and the committed study of all of them if there is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import rooftile
from rooftile_lab.bench import results
from rooftile_lab.bench.learning.methods import EXACT, METHODS
from rooftile_lab.bench.learning.study import Plan as Study
from rooftile_lab.bench.learning.study import learn_recall
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.suites.recall import PLANS
from rooftile_lab.bench.threads import one_thread
from rooftile_lab.report.plan import Plan

# a checkout has it, an installed package has not
COMMITTED = Path(rooftile.__file__).parents[1] / "benchmarks" / "results" / "h200-recall.jsonl"
# in the order in which they are trained; what has no time left is left out
HERE = (EXACT, "linear", "linformer")
PATIENCE = 35.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The recall of one method."""

    method: str
    recall: float
    by_pairs: dict[int, float]
    by_distance: dict[int, float]  # by the upper end of a range
    by_rate: dict[float, float]  # over all tests, by the learning rate
    loss: float | None = None  # nats per byte of English
    parameters: int | None = None
    step_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """One run: its methods, the exact one first if it is there, and the needles."""

    machine: str  # where and when, in words
    problem: str
    chance: float
    curves: tuple[Curve, ...]
    needles: dict[str, dict[int, float]]  # by way and depth in percent
    frequencies_loss: float | None = None
    failed: tuple[str, ...] = ()

    @property
    def exact(self) -> Curve | None:
        return next((one for one in self.curves if one.method == EXACT), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """The run of this report, and the committed one."""

    here: Curves
    committed: Curves | None

    def json(self) -> dict[str, Any]:
        """Returns the numbers."""
        return asdict(self)


def measure(plan: Plan, device: str, step: Callable[[float, str], None]) -> Recall:
    """Trains a few methods on recall, until the time is over. A quick plan takes three steps, which teach nothing."""
    study = PLANS["cpu"]
    if plan.is_quick:
        study = replace(study, steps=3, tests=4)
    return Recall(here=_here(study, device, step), committed=committed(COMMITTED))


def _here(study: Study, device: str, step: Callable[[float, str], None]) -> Curves:
    began, found, failed = time.monotonic(), [], []
    for number, method in enumerate(HERE):
        taken = time.monotonic() - began
        if number > 1 and taken * (number + 1) / number > PATIENCE:
            failed.append(
                f"{method} was left out: {number} methods took {taken:.0f} s, and {PATIENCE:.0f} s are for this section."
            )
            continue
        step(number / len(HERE), f"training a small decoder with {method} attention")
        with one_thread(torch.device(device)):
            learnt = learn_recall(method, study, torch.device(device), lambda words: None)
        curve = Curve(
            method=method, recall=learnt.recall, by_pairs=learnt.by_pairs, by_distance=learnt.by_distance, by_rate=learnt.by_rate,
            parameters=learnt.model.parameter_count, step_us=sorted(learnt.trained.step_us)[len(learnt.trained.step_us) // 2],
        )  # fmt: skip
        found.append(curve)
    task = study.task
    words = (
        f"{study.layers} layers of {study.hidden}, {study.steps} steps of {study.batch} texts of {task.length} tokens, "
        f"learning rate {study.rates[0]:g}"
    )
    return Curves(
        machine="this machine", problem=words, chance=task.chance, curves=tuple(found), needles={}, failed=tuple(failed)
    )


def committed(path: Path) -> Curves | None:
    """The last rows of a file that `rooftile bench recall --json` wrote; None if there is none."""
    if not path.is_file():
        return None
    rows = [row for row in results.latest(results.read(path)) if row.suite == "recall"]
    return curves_of(rows) if any(row.case == "recall" and not row.reason for row in rows) else None


def curves_of(rows: Iterable[Row]) -> Curves:
    """The curves in rows of the suite."""
    rows = list(rows)
    read = {row.backend: row for row in rows if row.case == "english" and not row.reason}
    learnt = [row for row in rows if row.case == "recall" and not row.reason]
    # processes beside each other end in any order
    learnt.sort(key=lambda row: METHODS.index(row.backend))
    curves = []
    for row in learnt:
        english = read.get(row.backend)
        curves.append(
            Curve(
                method=row.backend, recall=row.measures["all_recall"], by_pairs=_numbers(row, "pairs"),
                by_distance=_numbers(row, "distance"),
                by_rate={float(rate): share for rate, share in row.settings.get("recall_by_rate", {}).items()}, loss=english.measures["loss_nats"] if english else None,
                parameters=row.settings.get("parameters"), step_us=row.median_us,
            )
        )  # fmt: skip
    first = learnt[0]
    return Curves(
        machine=f"one {first.device}, {first.date[:10]}, commit {first.commit}",
        problem=f"{first.problem}, {first.settings.get('steps')} steps",
        chance=first.measures["chance_recall"],
        curves=tuple(curves),
        needles={row.backend: _numbers(row, "depth") for row in rows if row.case == "needle" and not row.reason},
        frequencies_loss=next((row.measures["frequencies_nats"] for row in read.values()), None),
        failed=tuple(f"{row.case}, {row.backend}: {row.reason}" for row in rows if row.reason),
    )


def _numbers(row: Row, what: str) -> dict[int, float]:
    """The measures named pairs_N_recall, distance_N_recall or depth_N_recall, by N."""
    return {int(name.split("_")[1]): value for name, value in row.measures.items() if name.startswith(f"{what}_")}
