"""The commands of `rooftile`, put together."""

from __future__ import annotations

import typer

from rooftile.cli import accuracy, bench, doctor, explain, generate, report, warmup

app = typer.Typer(
    name="rooftile",
    help="Exact, hardware-aware attention for PyTorch: what this machine can do, and what attention does on it.",
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
