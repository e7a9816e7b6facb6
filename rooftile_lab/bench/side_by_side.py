"""Runs the cases of a suite in several processes at once: small models leave most of a GPU idle between their kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from json import loads

from rooftile.cost.session import Session
from rooftile_lab.bench.processes import environment
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row
from rooftile_lab.bench.run import Progress


def side_by_side(session: Session, suite: str, groups: Sequence[Sequence[str]], jobs: int, say: Progress) -> Iterator[Row]:
    """The rows of each group of cases, in the order in which groups end; `jobs` processes run at once, a group in each.

    Rows have no times, which would be those of a busy device. A process that fails is a row with a reason for each of its cases.
    """
    say(f"{len(groups)} processes, {jobs} at once")
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_run, session, suite, group): group for group in groups}
        for done, which in enumerate(as_completed(running), 1):
            group = running[which]
            say(f"{', '.join(group)}: process {done} of {len(groups)} is done")
            lines, failed = which.result()
            for line in lines:
                yield _untimed(session, line, jobs)
            if failed:
                for name in group:
                    yield timed_row(session, [], suite=suite, case=name, backend="rooftile", phase="step", reason=failed)


def _run(session: Session, suite: str, group: Sequence[str]) -> tuple[list[str], str]:
    """The lines that a process prints for its cases, and why it failed."""
    words = [word for name in group for word in ("--case", name)]
    command = [sys.executable, "-m", "rooftile_lab", "bench", suite, *words, "--device", str(session.device), "--json", "-"]
    # rows of one run name one commit, whatever a process finds
    done = subprocess.run(command, env=environment(ROOFTILE_COMMIT=session.commit), capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not done.returncode:
        return lines, ""
    last = done.stderr.strip().rpartition("\n")[-1]
    return lines, f"failed with {done.returncode}: {last[:600]}"


def _untimed(session: Session, line: str, jobs: int) -> Row:
    """The row of a line, with the date of this run and without times."""
    row = Row(**loads(line))
    settings = row.settings | {"side_by_side": jobs}
    return replace(row, date=session.date, median_us=None, low_us=None, high_us=None, samples=None, settings=settings)
