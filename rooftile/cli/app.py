"""Combines the commands of `rooftile`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated

import typer

from rooftile.cli import calibrate, diagnose, doctor, explain, generate, mask, plan, quantise, serve, warmup
from rooftile.cli.output import add_command

app = typer.Typer(
    name="rooftile",
    help="Attention, number formats, serving and a diagnosis of bottlenecks for PyTorch: measures, explains and runs them here.",
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
    "generate": generate.generate, "calibrate": calibrate.calibrate,
    "quantise": quantise.quantise,
    "serve": serve.serve,
}  # fmt: skip
for _name, _command in COMMANDS.items():
    add_command(app, _name, _command)
# further commands come from other packages: each entry point is a function that adds its own
for _entry in entry_points(group="rooftile.commands"):
    _entry.load()(app)
