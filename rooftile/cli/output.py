"""Shared by all commands: common options, progress on stderr, tables and JSON on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooftile.cli.command import Command, with_flags_named
from rooftile.errors import InvalidInput

if TYPE_CHECKING:
    # torch takes seconds to import, and --help does not need it; so in all files of this folder
    from rooftile.exact.cases import Case

Progress = Callable[[str], None]

DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N; auto uses CUDA if there is a GPU.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]
CaseOption = Annotated[list[str] | None, typer.Option("--case", help="A case's name; may be given several times.")]
TagOption = Annotated[str, typer.Option("--tag", help="Every case with this tag: conformance, gpu-bench, cpu-bench, ...")]


def chosen_cases(names: Sequence[str] | None, tag: str, otherwise: str) -> list[Case]:
    """Returns the cases of --case and --tag, or those tagged `otherwise` if neither is given."""
    from rooftile.exact.cases import CASES, tagged

    unknown = [name for name in names or () if name not in CASES]
    if unknown:
        raise InvalidInput(f"no case is named {unknown[0]!r}; `rooftile bench list` prints all cases")
    if tag and not tagged(tag):
        tags = sorted({word for case in CASES.values() for word in case.tags})
        raise InvalidInput(f"no case has the tag {tag!r}; has {', '.join(tags)}")
    named = [CASES[name] for name in names or ()]
    return named + (tagged(tag) if tag else []) or tagged(otherwise)


def add_command(app: typer.Typer, name: str, command: Callable[..., None]) -> None:
    """Adds a command whose line in the list of commands is the first sentence of its docstring, whole."""
    sentence = " ".join((command.__doc__ or "").split("\n\n")[0].split())
    app.command(name, short_help=sentence, cls=Command)(with_flags_named(command))


@contextmanager
def progress(*, lines: bool = False) -> Iterator[Progress]:
    """Shows the current step on stderr: in place on a terminal; elsewhere a line per step with `lines`, else nothing."""
    if not sys.stderr.isatty():
        yield (lambda words: print(words, file=sys.stderr, flush=True)) if lines else (lambda words: None)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda words: status.update(words)


def print_json(value: Any) -> None:
    """Prints a value as JSON on stdout."""
    print(json.dumps(value, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Prints a table: the first `left` columns flush left, the others right. Piped output is never truncated."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False).print(table)
