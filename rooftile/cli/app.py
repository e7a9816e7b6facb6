"""Combines the commands of `rooftile`."""

from __future__ import annotations

import typer

from rooftile.cli import accuracy, bench, doctor, explain, generate, report, warmup

app = typer.Typer(
    name="rooftile",
    help="Exact, hardware-aware attention for PyTorch: measures, explains and runs attention on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("doctor")(doctor.doctor)
app.command("explain")(explain.explain)
app.command("warmup")(warmup.warmup)
app.command("accuracy")(accuracy.accuracy)
app.command("generate")(generate.generate)
app.command("report")(report.report)
app.add_typer(bench.app, name="bench")
