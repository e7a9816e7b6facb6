"""The row of a program after a public one: verdict and truth, seconds of both, prices and savings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from rooftile.cost.session import Session
from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.errors import Unsupported
from rooftile_lab.bench.diagnosis import trial
from rooftile_lab.bench.diagnosis.cases import Case
from rooftile_lab.bench.diagnosis.truth import Truth
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row, with_measures
from rooftile_lab.bench.run import Progress

JUDGED = ("measured", "confirmed")


def public_row(session: Session, case: Case, say: Progress, size: str, budget: float, apply: Sequence[str]) -> Row:
    """Runs a case alone, in the experiments of its truth, and under a diagnosis; a run that fails is the row's reason."""
    load = os.getloadavg()[0]
    # the case runs once at each size on a machine
    named: dict[str, Any] = {
        "suite": "diagnosis", "case": case.name, "backend": "rooftile", "phase": f"step-{size}", "problem": case.follows,
    }  # fmt: skip
    settings: dict[str, Any] = {"budget_s": budget, "threads": torch.get_num_threads(), "load": round(load, 2)}
    try:
        truth, alone = trial.truth_of(case, size, session.device.type)
    except Unsupported as reason:
        return timed_row(session, [], dtype=session.dtype, settings=settings, reason=f"failed alone: {reason}", **named)
    measures = measures_of(truth) | {"program_s": alone.process_s}
    settings |= {"truth": truth.cause}
    say(f"{case.name}: {truth.cause}, by other experiments")
    try:
        found, seconds = trial.diagnosed(case, size, budget, apply)
    except Unsupported as reason:
        row = timed_row(session, [], dtype=session.dtype, settings=settings, reason=f"failed in diagnose: {reason}", **named)
        return with_measures(row, **measures)
    say(f"{case.name}: {found.sentence}")
    settings |= {"verdict": str(found.step.bound), "confidence": found.step.confidence, "notes": list(found.notes)}
    row = timed_row(session, [found.step.time_us], dtype=session.dtype, settings=settings, **named)
    shares = {f"verdict_{cause}_percent": 100 * share for cause, share in found.step.shares.items()}
    return with_measures(row, **measures, **shares, diagnosing_s=seconds, judged_percent=judged(found), **prices(found))


def measures_of(truth: Truth) -> dict[str, float]:
    """Returns the times of the experiments, and the shares that follow."""
    times = {
        "whole_us": truth.whole_us, "tiny_us": truth.tiny_us, "without_us": truth.without_us,
        "arithmetic_us": truth.arithmetic_us, "arithmetic_factor_ratio": truth.factor,
    }  # fmt: skip
    shares = {f"truth_{cause}_percent": 100 * share for cause, share in truth.shares.items()}
    return {name: us for name, us in times.items() if us is not None} | shares


def judged(found: Diagnosis) -> float:
    """Returns the percent of the operators' time whose verdict an experiment has given; 0 without operators."""
    total = sum(op.time_us for op in found.ops)
    return 100 * sum(op.time_us for op in found.ops if op.confidence in JUDGED) / total if total else 0.0


def prices(found: Diagnosis) -> dict[str, float]:
    """Returns the predicted and the measured saving of each remedy that was tried, in µs."""
    measures = {}
    for remedy in found.remedies:
        if remedy.measured_us is not None:
            word = remedy.name.replace(" ", "-").replace(":", "")
            measures[f"{word}_predicted_us"] = remedy.predicted_us
            measures[f"{word}_measured_us"] = remedy.measured_us
    return measures
