"""The row of a program after a public one: verdict and truth, seconds of both, prices and savings."""

from __future__ import annotations

import os
from typing import Any

import torch

from rooftile.cost.session import Session
from rooftile.diagnosis.counts.counters import busiest
from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.diagnosis.verdicts.classify import ADDRESSES
from rooftile.errors import Unsupported
from rooftile_lab.bench.diagnosis import trial
from rooftile_lab.bench.diagnosis.cases import Case
from rooftile_lab.bench.diagnosis.truth import Truth
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row, with_measures
from rooftile_lab.bench.run import Progress

JUDGED = ("measured", "confirmed")
KEYS = ("module", "op", "phase")


def public_row(session: Session, case: Case, say: Progress, size: str, asked: trial.Settings) -> Row:
    """Runs a case alone, in the experiments of its truth, and under a diagnosis; a run that fails is the row's reason."""
    load = os.getloadavg()[0]
    # the case runs once at each size on a machine
    named: dict[str, Any] = {
        "suite": "diagnosis", "case": case.name, "backend": "rooftile", "phase": f"step-{size}", "problem": case.follows,
    }  # fmt: skip
    settings: dict[str, Any] = {"budget_s": asked.budget, "threads": torch.get_num_threads(), "load": round(load, 2)}
    try:
        truth, alone = trial.truth_of(case, size, session.device.type)
    except Unsupported as reason:
        return timed_row(session, [], dtype=session.dtype, settings=settings, reason=f"failed alone: {reason}", **named)
    measures = measures_of(truth) | {"program_s": alone.process_s}
    settings |= {"truth": truth.cause}
    say(f"{case.name}: {truth.cause}, by other experiments")
    try:
        found, seconds = trial.diagnosed(case, size, asked)
    except Unsupported as reason:
        row = timed_row(session, [], dtype=session.dtype, settings=settings, reason=f"failed in diagnose: {reason}", **named)
        return with_measures(row, **measures)
    say(f"{case.name}: {found.sentence}")
    settings |= {"verdict": str(found.step.bound), "confidence": found.step.confidence, "notes": list(found.notes)}
    row = timed_row(session, [found.step.time_us], dtype=session.dtype, settings=settings, **named)
    shares = {f"verdict_{cause}_percent": 100 * share for cause, share in found.step.shares.items()}
    measures |= shares | {"diagnosing_s": seconds, "judged_percent": judged(found), "adds_up_percent": adds_up(found)}
    measures |= prices(found) | counted(found)
    return with_measures(row, **measures)


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


def adds_up(found: Diagnosis) -> float:
    """Returns the percent of the step that its operators and gaps are together."""
    parts_us = sum(op.time_us for op in found.ops) + sum(found.step.idle_us.values())
    return 100 * parts_us / found.step.time_us


def counted(found: Diagnosis) -> dict[str, float]:
    """Returns the percent of the counted operators' time whose verdict of memory or compute is the counters', and how many.

    Addresses are computed by the multiprocessors, for words in memory: either may be the busier one.
    """
    times = {True: 0.0, False: 0.0}
    compared = 0
    for row in found.counters:
        ops = [op for op in found.ops if (op.module, op.op, op.phase) == tuple(row[key] for key in KEYS)]
        op = next((op for op in ops if op.bytes == (row["bytes"] or 0) * op.calls), None)
        bound = busiest(row)
        if bound and op is not None and op.bound in ("memory", "compute"):
            times[op.unit == ADDRESSES or bound == op.bound] += op.time_us
            compared += 1
    total = sum(times.values())
    return {"counters_agree_percent": 100 * times[True] / total, "counted_operators": float(compared)} if total else {}


def prices(found: Diagnosis) -> dict[str, float]:
    """Returns the predicted and the measured saving of each remedy that was tried, in µs."""
    measures = {}
    for remedy in found.remedies:
        if remedy.measured_us is not None:
            word = remedy.name.replace(" ", "-").replace(":", "")
            measures[f"{word}_predicted_us"] = remedy.predicted_us
            measures[f"{word}_measured_us"] = remedy.measured_us
    return measures
