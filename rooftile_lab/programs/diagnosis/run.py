"""Diagnoses each program, tries the remedies, and writes what was predicted beside what was measured: a row for each program.

    PYTHONPATH=. python -m rooftile_lab.programs.diagnosis.run --device cpu --json benchmarks/results/cpu-diagnosis.jsonl

Measures of a row: the share of the operators' time with a verdict from experiments, the share for which all runs agree, the
seconds that a diagnosis took beyond 50 steps, and for each remedy the saving that was predicted and the one that was measured.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

import rooftile as rt
from rooftile.cost.session import Session, open_session
from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import figures
from rooftile_lab.programs.diagnosis.programs import PROGRAMS

APPLY = ("graph", "compile", "attention", "dtype")
JUDGED = ("measured", "confirmed")


def judged(found: Diagnosis) -> float:
    """Percent of the operators' time whose verdict an experiment has given."""
    total = sum(op.time_us for op in found.ops)
    return 100 * sum(op.time_us for op in found.ops if op.confidence in JUDGED) / total


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
    last = runs[-1]
    measures = {
        "judged_percent": median(judged(found) for found in runs),
        "agreeing_percent": agreeing(runs),
        "diagnosing_s": median(seconds),
        "overhead_percent": 100 * (last.step.overhead_share or 0.0),
    }
    for remedy in last.remedies:
        if remedy.measured_us is not None:
            word = remedy.name.replace(" ", "-").replace(":", "")
            measures[f"{word}_predicted_us"] = remedy.predicted_us
            measures[f"{word}_measured_us"] = remedy.measured_us
    how = {f"{r.name}_how": r.how for r in last.remedies if r.measured_us is not None and r.predicted_us > 0}
    # a CPU's times depend on them
    how |= {"threads": torch.get_num_threads()} if session.device.type == "cpu" else {}
    steps = [found.step.time_us for found in runs]
    return Row(
        **session.about(session.dtype), suite="diagnosis", case=name, backend="rooftile", phase="step",
        median_us=figures(median(steps)), low_us=figures(min(steps)), high_us=figures(max(steps)), samples=len(runs),
        measures={word: figures(value) for word, value in measures.items()},
        settings={"bound": str(last.step.bound), "confidence": last.step.confidence, "budget_s": budget} | how,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case", action="append", choices=PROGRAMS, help="several; all without it")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the experiments of a run")
    parser.add_argument("--json", type=Path, help="append rows to this file")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    session = open_session(device)
    for name in asked.case or PROGRAMS:
        runs, seconds = [], []
        with PROGRAMS[name](device) as step:
            for number in range(asked.runs):
                torch.manual_seed(0)
                began = time.perf_counter()
                found = rt.diagnose(step, apply=APPLY if number == asked.runs - 1 else (), budget=asked.budget)
                if number < asked.runs - 1 or asked.runs == 1:
                    seconds.append(time.perf_counter() - began - 50 * found.step.time_us / 1e6)
                runs.append(found)
        line = row(session, name, runs, seconds, asked.budget).json()
        print(f"{name}: {runs[-1].sentence}\n{line}", flush=True)
        if asked.json:
            with asked.json.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
