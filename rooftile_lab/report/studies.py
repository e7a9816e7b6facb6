"""Studies that the page shows twice: as rows that were measured here, small on a CPU, and as rows that were committed.

The study of context serves small models, the studies of experts and of users' histories train them. All are suites of
`rooftile bench`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rooftile
from rooftile.cost.session import open_session
from rooftile_lab.bench import results
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.suites import context, expert_training, user_histories
from rooftile_lab.report.plan import Plan

# a checkout has it, an installed package has not
COMMITTED = Path(rooftile.__file__).parents[1] / "benchmarks" / "results"
Step = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The rows of this report, and committed rows."""

    here: tuple[Row, ...]
    committed: tuple[Row, ...]

    def json(self) -> dict[str, Any]:
        """Returns the numbers."""
        return {name: [json.loads(row.json()) for row in getattr(self, name)] for name in ("here", "committed")}


def contexts(plan: Plan, device: str, step: Step) -> Study:
    """Serves the three models of the study; a quick plan has short contexts."""
    session = open_session(device)
    sizes = context.PLANS["cpu" if plan.is_quick else plan.device]
    if plan.is_quick:
        sizes = replace(sizes, contexts=(32, 64, 128), steps=2)
    rows = _counted(context.measure(session, context.MODELS, lambda words: None, sizes), 6 * len(sizes.contexts), step)
    return Study(here=tuple(rows), committed=committed(COMMITTED / "h200-context.jsonl", "context"))


def experts(plan: Plan, device: str, step: Step) -> Study:
    """Trains the decoders of the study; a quick plan takes three steps, which teach nothing."""
    session = open_session(device)
    sizes = expert_training.PLANS["cpu"]
    if plan.is_quick:
        sizes = replace(sizes, steps=3, tests=4)
    kinds = expert_training.GPU
    rows = _counted(expert_training.measure(session, kinds, lambda words: None, plan=sizes), len(kinds), step)
    return Study(here=tuple(rows), committed=committed(COMMITTED / "h200-expert-training.jsonl", "expert-training"))


def histories(plan: Plan, device: str, step: Step) -> Study:
    """Trains the models of clicks on short histories; a quick plan takes two steps, which teach nothing."""
    session = open_session(device)
    sizes = user_histories.SHORT
    if plan.is_quick:
        sizes = replace(
            sizes, stages=tuple(replace(stage, steps=2, users=2) for stage in sizes.stages), test_users=8, timed_users=2
        )
    due = len(user_histories.CPU) * len(sizes.stages)
    rows = _counted(user_histories.measure(session, user_histories.CPU, lambda words: None, sizes), due, step)
    files = sorted(COMMITTED.glob("*-user-histories.jsonl"))
    return Study(here=tuple(rows), committed=tuple(row for path in files for row in committed(path, "user-histories")))


def committed(path: Path, suite: str) -> tuple[Row, ...]:
    """The last rows of a file that `rooftile bench SUITE --json` wrote; none if there is no such file."""
    if not path.is_file():
        return ()
    return tuple(row for row in results.latest(results.read(path)) if row.suite == suite)


def machine_of(rows: Iterable[Row]) -> str:
    """The machine, the day and the commit of rows, as the begin of a sentence."""
    first = next(iter(rows))
    return f"One {first.device}, {first.date[:10]}, commit {first.commit}"


def _counted(rows: Iterator[Row], due: int, step: Step) -> Iterator[Row]:
    """Says before each row how far the study is."""
    step(0.0, "starting the study")
    for number, row in enumerate(rows, 1):
        yield row
        step(min(number / due, 0.99), f"{row.backend}: {row.case}")
