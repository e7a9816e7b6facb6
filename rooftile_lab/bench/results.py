"""One measured line (Row), its JSON, and the tables that are written from such lines into Markdown.

Published numbers come from `benchmarks/results/*.jsonl`, one Row a line. A table in a Markdown file sits between

    <!-- table: benchmarks/results/h200.jsonl phase=fwd metric=tflops cases=d128-* backends=rooftile,torch-flash -->
    <!-- /table -->

and `python -m rooftile_lab.bench.results docs/reference/speed.md` writes what is between the two (metric: tflops, us,
percent, mib, error).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rooftile.cost.session import About
from rooftile.drawing import notebook as shown
from rooftile.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(About):
    """One case on one backend in one phase, or the reason why it was not timed.

    A field that does not apply keeps its default and is absent from the line. Low and high are quartiles; of fewer than
    four runs they are the least and the most.
    """

    suite: str  # the `rooftile bench` command that measured it
    case: str
    backend: str  # as asked: "rooftile" for the automatic choice, a backend's or a peer's name
    ran: str = ""  # the backend that ran: for "rooftile" the one that was chosen
    phase: str  # "fwd" without gradients, "bwd" the backward alone, "step", "decode", "serve", ...
    problem: str = ""  # the spec and sizes in words
    median_us: float | None = None  # a call, a training step or a whole run of a workload
    low_us: float | None = None
    high_us: float | None = None
    samples: int | None = None
    tflops: float | None = None
    gbs: float | None = None  # compulsory bytes over the time
    roofline_percent: float | None = None
    binds: str = ""  # the roof that is met first: "compute" or "memory"
    error: float | None = None  # |x - exact| / |exact|, Frobenius, against fp64; the worst of dq, dk, dv in "bwd"
    peak_bytes: int | None = None  # beyond the inputs; in "bwd" of a forward and backward together
    peak_kind: str = ""  # how it was measured
    measures: dict[str, float] = field(default_factory=dict)  # other numbers, medians; each name ends with its unit
    low: dict[str, float] = field(default_factory=dict)  # the same for `measures`
    high: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # how it was run, where the case's name does not say
    reason: str = ""  # why there is no time

    def __repr__(self) -> str:
        found = [f"{name} {value:,.4g}" for name, value in self.measures.items()][:3]
        if self.median_us is not None:
            found = [f"{self.median_us:,.4g} us", *([f"{self.tflops:,.4g} TFLOP/s"] if self.tflops is not None else []), *found]
        words = self.reason or ", ".join(found) or "no time"
        return f"Row({self.suite} {self.case} {self.backend} {self.phase} on {self.device}: {words})"

    def _repr_html_(self) -> str:
        return shown.card(shown.facts((name, value) for name, value in json.loads(self.json()).items()))

    def json(self) -> str:
        """The row as one line, without the fields that do not apply."""
        shared = {one.name for one in fields(About)}
        # the measurement first, then the machine
        ordered = sorted(fields(self), key=lambda one: one.name in shared)
        values = [(one.name, getattr(self, one.name), one.default) for one in ordered]
        return json.dumps({name: value for name, value, default in values if value != default and value != {}})


METRICS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "tflops": ("TFLOP/s", lambda row: f"{row.tflops:.1f}" if (row.tflops or 0) < 10 else f"{row.tflops:.0f}"),
    "us": ("µs", lambda row: f"{row.median_us:,.0f}"),
    "percent": ("% of roofline", lambda row: f"{row.roofline_percent:.0f}"),
    "mib": ("MiB at peak", lambda row: f"{(row.peak_bytes or 0) / 2**20:,.1f}"),
    "error": ("error", lambda row: f"{row.error:.1e}" if row.error is not None else "-"),
}


def read(path: str | Path) -> list[Row]:
    """The rows of a JSON-lines file. Raises InvalidInput for a file that is absent or holds something else."""
    path = Path(path)
    if not path.exists():
        raise InvalidInput(f"{path} does not exist; `rooftile bench attention --json {path}` writes such a file")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                rows.append(Row(**json.loads(line)))
            except (json.JSONDecodeError, TypeError) as error:
                raise InvalidInput(
                    f"{path}, line {number} is no benchmark row ({error}); `rooftile bench attention --json` writes them"
                ) from error
    return rows


def append(path: str | Path, lines: Iterable[str]) -> None:
    """Adds lines, as a row's `json` makes them, to the end of a JSON-lines file, and makes it if there is none."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.writelines(line + "\n" for line in lines)


def latest(rows: Iterable[Row]) -> list[Row]:
    """For each (suite, case, backend, phase, device) the row with the last date; of equal dates, the later line."""
    last: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = (row.suite, row.case, row.backend, row.phase, row.device)
        if key not in last or row.date >= last[key].date:
            last[key] = row
    return list(last.values())


def table(rows: Sequence[Row], *, phase: str, metric: str = "tflops", backends: Sequence[str] = ()) -> str:
    """A Markdown table of one phase: cases down, backends across; a dash where there is no number."""
    if metric not in METRICS:
        raise InvalidInput(f"metric is {metric!r}; has {', '.join(METRICS)}")
    unit, shown = METRICS[metric]
    rows = [row for row in latest(rows) if row.phase == phase]
    columns = list(backends) or list(dict.fromkeys(row.backend for row in rows))
    cells = {(row.case, row.backend): shown(row) for row in rows if row.median_us is not None}
    lines = [f"| {phase}, {unit} | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    for case in dict.fromkeys(row.case for row in rows):
        lines.append(f"| {case} | {' | '.join(cells.get((case, name), '-') for name in columns)} |")
    return "\n".join([*lines, "", *sources(rows)])


def measures_table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """A Markdown table of other numbers: cases down, the named `measures` across; a dash where there is none."""
    rows = latest(rows)
    lines = [f"| | {' | '.join(name.replace('_', ' ') for name in names)} |", "|---|" + "--:|" * len(names)]
    for row in rows:
        lines.append(f"| {row.case} | {' | '.join(str(row.measures.get(name, '-')) for name in names)} |")
    return "\n".join([*lines, "", *sources(rows)])


def sources(rows: Iterable[Row]) -> list[str]:
    """A sentence for each machine, version, day and commit that the rows come from."""
    return sorted({f"{row.device}, torch {row.torch}, {row.date[:10]}, commit {row.commit}." for row in rows})


_MARKED = re.compile(r"(<!-- table: (?P<what>[^>]*?) -->\n).*?(<!-- /table -->)", re.DOTALL)


def write_tables(text: str, folder: Path) -> str:
    """The text with each marked table written anew. Files are sought from `folder`."""

    def fill(found: re.Match[str]) -> str:
        source, *words = found["what"].split()
        asked = dict(word.split("=", 1) for word in words)
        rows = [row for row in read(folder / source) if fnmatch(row.case, asked.get("cases", "*"))]
        backends = [name for name in asked.get("backends", "").split(",") if name]
        if "measures" in asked:
            return f"{found[1]}{measures_table(rows, asked['measures'].split(','))}\n{found[3]}"
        made = table(rows, phase=asked.get("phase", "fwd"), metric=asked.get("metric", "tflops"), backends=backends)
        return f"{found[1]}{made}\n{found[3]}"

    return _MARKED.sub(fill, text)


def main(paths: Sequence[str]) -> None:
    """Writes the marked tables of each Markdown file in place."""
    for name in paths:
        path = Path(name)
        path.write_text(write_tables(path.read_text(), Path.cwd()))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
