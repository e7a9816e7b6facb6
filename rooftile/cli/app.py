"""Combines the commands of `rooftile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from rooftile.cli import (
    accuracy,
    bench,
    calibrate,
    diagnose,
    doctor,
    explain,
    generate,
    mask,
    plan,
    quantise,
    report,
    serve,
    warmup,
)
from rooftile.cli.output import add_command

app = typer.Typer(
    name="rooftile",
    help="Exact, hardware-aware attention for PyTorch: measures, explains and runs attention on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        from rooftile import __version__

        print(f"rooftile {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Takes the options that stand before a command."""


COMMANDS: dict[str, Callable[..., None]] = {
    "doctor": doctor.doctor, "explain": explain.explain, "mask": mask.mask, "warmup": warmup.warmup,
    "diagnose": diagnose.diagnose, "plan": plan.plan,
    "accuracy": accuracy.accuracy, "generate": generate.generate, "calibrate": calibrate.calibrate,
    "quantise": quantise.quantise,
    "report": report.report, "serve": serve.serve,
}  # fmt: skip
for _name, _command in COMMANDS.items():
    add_command(app, _name, _command)
app.add_typer(bench.app, name="bench", short_help="Speed, memory and error of attention beside its peers, and of serving.")
