"""The lab's commands, which `rooftile` finds by its entry point `rooftile.commands`."""

from __future__ import annotations

import typer

from rooftile.cli.output import add_command


def add(app: typer.Typer) -> None:
    """Adds `accuracy`, `report` and `bench` to the `rooftile` command."""
    from rooftile_lab.cli import accuracy, bench, report

    add_command(app, "accuracy", accuracy.accuracy)
    add_command(app, "report", report.report)
    app.add_typer(bench.app, name="bench", short_help="Speed, memory and error of attention beside its peers, and of serving.")
