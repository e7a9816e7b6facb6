"""Rows of a benchmark on their way out: JSON lines to a file or stdout, or a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooftile.cli.output import print_table, progress
from rooftile.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from rooftile.cost.session import Session
    from rooftile_lab.bench.results import Row
    from rooftile_lab.bench.run import Progress

FileOption = Annotated[
    Path | None,
    typer.Option("--json", help="Append JSON lines to this file; - prints them on stdout instead of the table."),
]


def measured(
    measure: Callable[[Session, Progress], Iterable[Row]], device: torch.device, json: Path | None, *, refresh: bool = False,
    shown: Callable[[list[Row]], None] | None = None,
) -> Session:  # fmt: skip
    """Opens a session, writes the rows that `measure` yields, and shows them, unless stdout has their lines.

    Args:
        measure: gets the session, and a function that it calls with a few words before each step.
        device: the device that is measured.
        json: the file of --json.
        refresh: whether the ceilings are measured now, even if they are known.
        shown: prints the rows; by default as one table.
    """
    from rooftile.cost.session import open_session

    with progress(lines=True) as say:
        say("measuring the ceilings")
        session = open_session(device, refresh=refresh)
        found = collect(measure(session, say), json)
    # only the first of several ranks has rows
    if str(json) != "-" and found:
        (shown or show)(found)
    return session


def words(listed: str) -> list[str]:
    """Returns the words of an option that are separated by commas."""
    return [word.strip() for word in listed.split(",") if word.strip()]


def numbers(flag: str, listed: str) -> list[int]:
    """Returns the whole numbers of an option that are separated by commas."""
    found = words(listed)
    if not found or not all(word.isdecimal() and int(word) > 0 for word in found):
        raise InvalidInput(f"{flag} is {listed!r}; give whole numbers by commas, such as 1,16,64")
    return [int(word) for word in found]


def chosen_words(flag: str, listed: str, known: Iterable[str]) -> list[str]:
    """Returns the words of an option that are separated by commas; each has to be a known one."""
    found, known = words(listed), list(known)
    wrong = next((word for word in found if word not in known), None if found else listed)
    if wrong is not None:
        raise InvalidInput(f"{flag} has {wrong!r}; give some of {', '.join(known)} by commas")
    return found


def collect(rows: Iterable[Row], json: Path | None) -> list[Row]:
    """All rows. Each is written as soon as it is there, so that a run that is cut short keeps what it has."""
    from rooftile_lab.bench import results

    found = []
    for row in rows:
        found.append(row)
        if str(json) == "-":
            print(row.json(), flush=True)
        elif json is not None:
            results.append(json, [row.json()])
    return found


COLUMNS = ("case", "phase", "backend", "us", "quartiles", "TFLOP/s", "GB/s", "% roof", "x time", "peak MiB", "error")
# columns for other measures that fit beside these
MOST_MEASURES = 10


def show(rows: Sequence[Row]) -> None:
    """The rows as a table, "x time" against the first backend of each case; below it the reasons of those not measured.

    A column that no row has a number for is left out. A row's other measures follow in columns of their own, or below the table
    if there are too many.
    """
    timed = [row for row in rows if row.median_us is not None or row.measures]
    first = {(row.case, row.phase): row for row in reversed(timed) if row.median_us is not None}
    names = list(dict.fromkeys(name for row in timed for name in row.measures))
    cells = [
        (*_cells(row, first.get((row.case, row.phase), row)), *(_number(row.measures.get(name)) for name in names))
        for row in timed
    ]
    columns = (*COLUMNS, *names) if len(names) <= MOST_MEASURES else COLUMNS
    kept = [n for n, column in enumerate(columns) if n < 4 or any(row[n] != "-" for row in cells)]
    print_table("", [columns[n] for n in kept], [[row[n] for n in kept] for row in cells], left=3)
    if len(names) > MOST_MEASURES:
        for row in timed:
            shown = ", ".join(f"{name} {_number(value)}" for name, value in row.measures.items())
            print(f"{row.case} {row.phase} {row.backend}: {shown}")
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason:
            reasons.setdefault((row.backend, row.reason), []).append(f"{row.case} {row.phase}")
    for (name, reason), where in reasons.items():
        print(f"{name}: {reason}  [{', '.join(where[:4])}{', ...' if len(where) > 4 else ''}]")


def _cells(row: Row, first: Row) -> tuple[str, ...]:
    return (
        row.case,
        row.phase,
        row.backend if row.ran in ("", row.backend) else f"{row.backend} ({row.ran})",
        "-" if row.median_us is None else f"{row.median_us:,.1f}",
        "-" if row.low_us is None or row.high_us is None else f"{row.low_us:,.0f}-{row.high_us:,.0f}",
        _number(row.tflops),
        _number(row.gbs),
        "-" if row.roofline_percent is None else f"{row.roofline_percent:.1f}",
        f"{row.median_us / first.median_us:.2f}" if row.median_us and first.median_us else "-",
        "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.1f}",
        "-" if row.error is None else f"{row.error:.1e}",
    )


def _number(value: float | None) -> str:
    """Four significant figures, all digits of what is larger."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.4g}"
