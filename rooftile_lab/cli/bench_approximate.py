"""`rooftile bench approximate`: the suite, or with --crossover the length from which each method pays."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Annotated

import typer

from rooftile.cli.output import DeviceOption, print_table
from rooftile.errors import InvalidInput
from rooftile_lab.cli.bench_suites import QuickOption, run_suite
from rooftile_lab.cli.rows import FileOption, measured

if TYPE_CHECKING:
    from rooftile.cost.session import Session
    from rooftile_lab.bench.methods.crossover import Found
    from rooftile_lab.bench.results import Row
    from rooftile_lab.bench.run import Progress


def approximate(
    case: Annotated[
        list[str] | None,
        typer.Option("--case", help="A case, or a pattern such as 'nsa-*'; a method with --crossover. Several times if needed."),
    ] = None,
    quick: QuickOption = False,
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
    from rooftile.hardware.device import device_of
    from rooftile_lab.bench.methods import crossover as lengths

    if limit is not None and not crossover:
        raise InvalidInput("--limit is for --crossover; give both, or choose cases by --case")
    if limit is not None and limit < lengths.SHORTEST:
        raise InvalidInput(f"--limit is {limit}; must be at least {lengths.SHORTEST}")
    if crossover and quick:
        raise InvalidInput("--quick is for the suite's cases; with --crossover give --limit or --budget")
    if not crossover:
        run_suite("approximate", case, device, json, quick=quick)
        return
    names = _methods(case)
    found: list[tuple[str, str, Found]] = []

    def rows(session: Session, say: Progress) -> Iterator[Row]:
        for name, phase, result, made in lengths.measure(session, names, limit, budget, say=say):
            found.append((name, phase, result))
            yield from made

    measured(rows, device_of(device), json, shown=lambda rows: _show(found))


def _show(found: list[tuple[str, str, Found]]) -> None:
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
