"""Diagnoses programs, tries the remedies, and sets what was predicted beside what was measured: a row for each program.

PROGRAM               share of the operators' time with a verdict from experiments, the share for which all runs agree, the
                      seconds that a diagnosis took beyond 50 steps, and for each remedy the predicted and the measured saving
PUBLIC                a program after a public one, diagnosed as a user's script: the verdict beside the truth by experiments that
                      the diagnosis does not make, its seconds beside the program's own, prices beside savings
counters-OPERATOR     bytes that a diagnosis predicts, beside those that Nsight Compute counts (`bench.diagnosis.counters`)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

import rooftile as rt
from rooftile.cost.session import Session
from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile_lab.bench.diagnosis import trial
from rooftile_lab.bench.diagnosis.cases import CASES
from rooftile_lab.bench.diagnosis.counters import OPERATORS, counted_row
from rooftile_lab.bench.diagnosis.programs import PROGRAMS
from rooftile_lab.bench.diagnosis.public_rows import judged, prices, public_row
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row, with_measures
from rooftile_lab.bench.run import Progress

GPU = CPU = tuple(PROGRAMS)
QUICK = ("llama-decoding-1", "adamw-200")
COUNTED = {f"counters-{name}": operator for name, operator in OPERATORS.items()}
ASKED = (*COUNTED, *CASES)
APPLY = ("graph", "compile", "attention", "dtype")


def measure(
    session: Session, names: Sequence[str], say: Progress, *, runs: int = 3, budget: float = 60.0, size: str = "toy",
    apply: Sequence[str] = (), ncu: bool = False,
) -> Iterator[Row]:  # fmt: skip
    """A row for each program and operator.

    Args:
        session: the run.
        names: the cases.
        say: is told the sentence of each diagnosis.
        runs: how often each program is diagnosed; the last run applies the remedies.
        budget: seconds for the experiments of a run.
        size: of the programs after public ones, "toy" or "real".
        apply: remedies to try on them.
        ncu: their verdicts are compared with the counters of Nsight Compute.
    """
    for name in names:
        say(name)
        if name in COUNTED:
            yield counted_row(session, name, COUNTED[name])
        elif name in CASES:
            yield public_row(session, CASES[name], say, size, trial.Settings(budget, apply, ncu))
        else:
            yield diagnosed(session, name, say, runs, budget)


def diagnosed(session: Session, name: str, say: Progress, runs: int, budget: float) -> Row:
    """Diagnoses one program."""
    found, seconds = [], []
    with PROGRAMS[name](session.device) as step:
        for number in range(1, runs + 1):
            torch.manual_seed(0)
            began = time.perf_counter()
            found.append(rt.diagnose(step, apply=APPLY if number == runs else (), budget=budget))
            if number < runs or runs == 1:
                seconds.append(time.perf_counter() - began - 50 * found[-1].step.time_us / 1e6)
    say(f"{name}: {found[-1].sentence}")
    return row(session, name, found, seconds, budget)


def agreeing(runs: Sequence[Diagnosis]) -> float:
    """Percent of the operators' time for which all runs have the verdict that most of them have."""
    bounds: dict[tuple[str, ...], Counter[str | None]] = {}
    times: dict[tuple[str, ...], float] = {}
    for found in runs:
        for op in found.ops:
            # equal operators of one module differ in their sizes
            key = (op.module, op.op, op.phase, str(op.flops), str(op.bytes))
            bounds.setdefault(key, Counter())[op.bound] += 1
            times[key] = times.get(key, 0.0) + op.time_us
    same = sum(us for key, us in times.items() if len(bounds[key]) == 1)
    return 100 * same / sum(times.values())


def row(session: Session, name: str, runs: Sequence[Diagnosis], seconds: Sequence[float], budget: float) -> Row:
    """The row of a program."""
    last = runs[-1]
    measures = {
        "judged_percent": median(judged(found) for found in runs),
        "agreeing_percent": agreeing(runs),
        "diagnosing_s": median(seconds),
        "overhead_percent": 100 * (last.step.overhead_share or 0.0),
    }
    measures |= prices(last)
    how: dict[str, Any] = {f"{r.name}_how": r.how for r in last.remedies if r.measured_us is not None and r.predicted_us > 0}
    # a CPU's times depend on them
    how |= {"threads": torch.get_num_threads()} if session.device.type == "cpu" else {}
    made = timed_row(
        session, [found.step.time_us for found in runs], dtype=session.dtype, suite="diagnosis", case=name, backend="rooftile",
        phase="step", settings={"bound": str(last.step.bound), "confidence": last.step.confidence, "budget_s": budget} | how,
    )  # fmt: skip
    return with_measures(made, **measures)
