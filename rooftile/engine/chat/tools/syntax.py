"""`Syntax`: a way of writing calls: its reader, its grammar, and how a chat template shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rooftile.engine.chat.tools.grammar import CallForm
from rooftile.engine.chat.tools.reader import CallReader


@dataclass(frozen=True, slots=True)
class Syntax:
    """A way of writing calls.

    Args:
        name: as `--tool-call-parser` has it.
        reader: reads answers.
        fits: tells whether a chat template writes calls like this.
        form: how calls are written; None where they are not constrained.
        others: names of vLLM's parsers for it.
    """

    name: str
    reader: type[CallReader]
    fits: Callable[[str], bool]
    form: CallForm | None = None
    others: tuple[str, ...] = ()
