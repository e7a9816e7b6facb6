"""A diagnosis at the end of a notebook's cell: its sentence, the step's time, the table, the roofline and the remedies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rooftile.diagnosis.output.json_rows import Op, StepSummary
from rooftile.diagnosis.output.page import HEAD, SHOWN, remedy_of, row_of
from rooftile.diagnosis.output.pictures.bars import time_line
from rooftile.diagnosis.output.pictures.roofline import roofline
from rooftile.diagnosis.output.table import PHASES
from rooftile.diagnosis.remedies.remedy import Remedy
from rooftile.drawing import notebook as shown
from rooftile.drawing.page import in_notebook


class Diagnosed(Protocol):
    """A diagnosis, as far as a notebook shows it."""

    @property
    def machine(self) -> Mapping[str, Any]: ...
    @property
    def ceilings(self) -> Mapping[str, Any]: ...
    @property
    def step(self) -> StepSummary: ...
    @property
    def ops(self) -> Sequence[Op]: ...
    @property
    def remedies(self) -> Sequence[Remedy]: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def sentence(self) -> str: ...


def notebook(diagnosis: Diagnosed, rows: int = SHOWN) -> str:
    """Returns what a notebook shows of a diagnosis: its sentence, the step's time, the table, the roofline and the remedies."""
    step, ops, remedies = diagnosis.step, diagnosis.ops, diagnosis.remedies
    names = [f"{op.module or '(step)'} {PHASES.get(op.phase, '')}{op.op.split('::')[-1]}" for op in ops]
    shown_rows = [row_of(n, op, remedies) for n, op in enumerate(ops[:rows])]
    cells = [(f"{row['number']} {row['module']} {row['op']}", *row["cells"], row["verdict"]) for row in shown_rows]
    more = shown.sentence(f"and {len(ops) - rows:,} more: print it, or write to_html() to a file") if len(ops) > rows else ""
    its = [remedy_of(remedy) for remedy in remedies]
    tried = [(one["name"], one["predicted"], one["measured"], one["how"]) for one in its]
    on_gpu = diagnosis.machine.get("type") == "cuda" or any(op.kernels for op in ops)
    return shown.card(
        shown.sentence(diagnosis.sentence), in_notebook(time_line(step, ops)), shown.table(HEAD, cells, words=(0, 7, 8, 9)), more,
        in_notebook(roofline(diagnosis.ceilings, step, ops, remedies, names, on_gpu)),
        shown.table(("remedy", "predicted", "measured", "how"), tried, words=(0, 3)) if tried else "",
        *(shown.sentence(f"Note: {note}.") for note in diagnosis.notes),
    )  # fmt: skip
