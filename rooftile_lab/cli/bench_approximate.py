"""`rooftile bench approximate`: the suite, or with --crossover the length from which each method pays."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Annotated

import typer

from rooftile.cli.output import DeviceOption, print_table, progress
from rooftile.errors import InvalidInput
from rooftile_lab.bench.suites import SUITES
from rooftile_lab.cli.rows import FileOption, collect, show

if TYPE_CHECKING:
    from rooftile_lab.bench.methods.crossover import Found
    from rooftile_lab.bench.results import Row


def approximate(
    case: Annotated[
        list[str] | None,
        typer.Option("--case", help="A case, or a pattern such as 'nsa-*'; a method with --crossover. Several times if needed."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases that say most, on a GPU.")] = False,
    crossover: Annotated[
        bool, typer.Option("--crossover", help="Search the length from which each method is faster than exact attention.")
    ] = False,
    limit: Annotated[int | None, typer.Option("--limit", help="The longest length of --crossover.")] = None,
    budget: Annotated[float, typer.Option("--budget", min=0.0, help="Seconds for --crossover.")] = 300.0,
    device: DeviceOption = "auto",
    json: FileOption = None,
) -> None:
    """Approximate methods beside exact attention and other libraries: time, memory, error, and the length from which each pays.

    Example: rooftile bench approximate --crossover --limit 8192
    """
    from rooftile.cost.session import open_session
    from rooftile.hardware.device import device_of
    from rooftile_lab.bench.methods import crossover as lengths

    target, suite = device_of(device), SUITES["approximate"]
    if limit is not None and not crossover:
        raise InvalidInput("--limit is for --crossover; give both, or choose cases by --case")
    if limit is not None and limit < lengths.SHORTEST:
        raise InvalidInput(f"--limit is {limit}; must be at least {lengths.SHORTEST}")
    if crossover and quick:
        raise InvalidInput("--quick is for the suite's cases; with --crossover give --limit or --budget")
    names = _methods(case) if crossover else suite.chosen(target.type, case or (), quick=quick)
    with progress(lines=True) as say:
        say("measuring the ceilings")
        session = open_session(target)
        found: list[tuple[str, str, Found]] = []

        def rows() -> Iterator[Row]:
            for name, phase, result, made in lengths.measure(session, names, limit, budget, say=say):
                found.append((name, phase, result))
                yield from made

        measured = collect(rows() if crossover else suite.load().measure(session, names, say), json)
    if str(json) == "-":
        return
    if not crossover:
        show(measured)
        return
    shown = [(name, phase, result.words(), f"{result.longest:,}", _speed(result)) for name, phase, result in found]
    columns = ("method", "phase", "faster from, tokens", "longest measured", "speed there, of exact")
    print_table("Where a method is faster than rooftile.attention", columns, shown, left=2)


def _methods(patterns: list[str] | None) -> list[str]:
    from rooftile_lab.bench.methods.crossover import NAMES

    for pattern in patterns or ():
        if not any(fnmatch(name, pattern) for name in NAMES):
            raise InvalidInput(f"--crossover has no method {pattern!r}; has {', '.join(NAMES)}")
    return [name for name in NAMES if not patterns or any(fnmatch(name, pattern) for pattern in patterns)]


def _speed(found: Found) -> str:
    return f"{found.points[-1].exact_us / found.points[-1].method_us:.2g}x" if found.points else "-"
