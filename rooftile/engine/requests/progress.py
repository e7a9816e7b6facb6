"""A progress bar for `generate`, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rooftile.errors import InvalidInput


@contextmanager
def progress_bar(total: int, shown: bool | None) -> Iterator[Callable[[int], None]]:
    """Shows how many of `total` prompts are answered.

    Args:
        total: the number of prompts.
        shown: whether to show it; None shows it on a terminal.

    Yields:
        A function that takes the number of tokens of a prompt that has just been answered.
    """
    if shown is not None and not isinstance(shown, bool):
        raise InvalidInput(f"use_tqdm is {shown!r}; must be True, False or None")
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]:,} tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task, tokens = bar.add_task("", total=total, tokens=0), 0

        def answered(more: int) -> None:
            nonlocal tokens
            tokens += more
            bar.update(task, advance=1, tokens=tokens)

        yield answered
