"""The result of a diagnosis: plain values, printed as a table and a sentence, and kept as JSON.

All fields have the names of the JSON; a test holds its schema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from rooftile.diagnosis.output.json_rows import Op, Program, StepSummary, row
from rooftile.diagnosis.output.notebook import notebook
from rooftile.diagnosis.output.page import render
from rooftile.diagnosis.output.table import sentence, text
from rooftile.diagnosis.output.trace import Trace
from rooftile.diagnosis.output.units import duration
from rooftile.diagnosis.output.written import values_of
from rooftile.diagnosis.remedies.remedy import Remedy, ranked
from rooftile.diagnosis.verdicts.findings import Finding
from rooftile.diagnosis.verdicts.step import CAUSES, StepEvidence, classify_step
from rooftile.drawing import notebook as shown
from rooftile.errors import InvalidInput

FORM = "rooftile.diagnosis/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The bounds of a program, and the changes that would move them. `print(d)` prints the table and one sentence."""

    machine: dict[str, Any]
    ceilings: dict[str, Any]
    program: Program
    step: StepSummary
    ops: tuple[Op, ...]  # most expensive first
    remedies: tuple[Remedy, ...]  # largest predicted saving first
    uncounted: tuple[str, ...] = ()  # operators without a rule
    counters: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    # the events of the profiled step, which are not in the JSON; None in a diagnosis that was read from JSON
    trace: Trace | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return self.text(20)

    def __repr__(self) -> str:
        bound = self.step.bound or "without a verdict"
        counts = f"{shown.counted(len(self.ops), 'operator')}, {shown.counted(len(self.remedies), 'remedy', 'remedies')}"
        return f"Diagnosis({duration(self.step.time_us)} per step of {shown.short(self.program.command)}: {bound}; {counts})"

    def _repr_html_(self) -> str:
        return notebook(Diagnosis.from_json(self.to_json()))

    def text(self, rows: int) -> str:
        """Returns the table of the `rows` most expensive operators, and the sentence."""
        return text(
            self.program,
            self.step,
            self.ops,
            self.remedies,
            uncounted=self.uncounted,
            counters=self.counters,
            notes=self.notes,
            rows=rows,
        )

    @property
    def sentence(self) -> str:
        """The diagnosis in a sentence or two."""
        return sentence(self.step, self.ops, self.remedies)

    def measured(self, name: str, saved_us: float) -> Diagnosis:
        """Returns the diagnosis with the measured saving of a remedy beside its predicted one.

        Several remedies of one name share it by their predictions. One that was not predicted is added, with a prediction of 0.
        """
        own = [r for r in self.remedies if r.name == name]
        if not own:
            new = Remedy(name=name, predicted_us=0.0, measured_us=saved_us, how="tried, not predicted", changes="rounding")
            return replace(self, remedies=(*self.remedies, new))
        total = sum(r.predicted_us for r in own)
        shares = {id(r): r.predicted_us / total for r in own}
        remedies = (replace(r, measured_us=saved_us * shares[id(r)]) if id(r) in shares else r for r in self.remedies)
        return replace(self, remedies=tuple(remedies))

    def noted(self, note: str) -> Diagnosis:
        """Returns the diagnosis with one more note."""
        return replace(self, notes=(*self.notes, note))

    def to_json(self) -> str:
        """Returns the diagnosis as JSON. Numbers are numbers; one that is unknown, infinite or NaN is null."""
        return json.dumps({"form": FORM} | _plain(self._values()), indent=2, allow_nan=False)

    def to_html(self) -> str:
        """Returns the diagnosis as one HTML file, which loads nothing: the table, the roofline, curves, savings, and the JSON.

        Raises InvalidInput if jinja2 is not installed.

        Example:
            >>> Path("diagnosis.html").write_text(rooftile.diagnose(model, x).to_html())
        """
        # what JSON has no number for is unknown on the page too
        plain = Diagnosis.from_json(self.to_json())
        return render(json.loads(self.to_json()), plain.program, plain.step, plain.ops, plain.remedies)

    def to_trace(self) -> str:
        """Returns the profiled step as a Chrome trace, in JSON, with verdicts as arguments of its events.

        chrome://tracing and ui.perfetto.dev show it. Each event of an operator has bound, unit, confidence and what confirmed
        it; on a GPU its kernels have too.

        Raises InvalidInput for a diagnosis that was read from JSON, which has no events.
        """
        if self.trace is None:
            raise InvalidInput("this diagnosis has no trace, because it was read from JSON; diagnose again, or use --trace FILE")
        annotated, notes = self.trace.annotated()
        return json.dumps(annotated | {"rooftile": {"sentence": self.sentence, "notes": notes}})

    def _values(self) -> dict[str, Any]:
        values = asdict(replace(self, trace=None))
        del values["trace"]
        return values

    @classmethod
    def from_json(cls, written: str) -> Diagnosis:
        """Reads a diagnosis that `to_json` wrote.

        Raises InvalidInput for anything else.
        """
        values = values_of(written, FORM)
        try:
            rebuilt = {"program": Program(**values["program"]), "step": StepSummary(**values["step"])}
            rebuilt["ops"] = tuple(Op(**_tuples(Op, op)) for op in values["ops"])
            rebuilt["remedies"] = tuple(Remedy(**_tuples(Remedy, remedy)) for remedy in values["remedies"])
            return cls(**_tuples(cls, values | rebuilt))
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"this diagnosis is not whole ({error}); write it again with to_json") from None


def diagnosis(
    *, machine: Mapping[str, Any], ceilings: Mapping[str, Any], program: Program, step: StepEvidence,
    findings: Sequence[Finding], remedies: Sequence[Remedy | None] = (), launches: int | None = None,
    peak_bytes: int | None = None, busy_us: float | None = None,
    kernels: Mapping[int, Sequence[str]] | None = None, counters: Sequence[Mapping[str, Any]] = (), notes: Sequence[str] = (),
    trace: Trace | None = None,
) -> Diagnosis:  # fmt: skip
    """Joins findings and remedies to a diagnosis: sorts both, and numbers them anew.

    findings: in any order; the `ops` of the remedies are positions in it, and so are the keys of `kernels`.
    """
    verdict = classify_step(step, findings)
    order = sorted(range(len(findings)), key=lambda i: -findings[i].time_us)
    place = {old: new for new, old in enumerate(order)}
    listed = tuple(replace(r, ops=tuple(sorted(place[i] for i in r.ops))) for r in ranked(remedies))
    ops = []
    for new, old in enumerate(order):
        its = tuple(i for i, remedy in enumerate(listed) if new in remedy.ops)
        ops.append(row(findings[old], step.time_us, tuple((kernels or {}).get(old, ())), its))
    uncounted = tuple(dict.fromkeys(op.op for op in ops if op.flops is None or op.bytes is None))
    return Diagnosis(
        machine=dict(machine),
        ceilings=dict(ceilings),
        program=program,
        step=StepSummary(
            time_us=step.time_us,
            spread_us=step.spread_us,
            launches=launches,
            flops=_total([op.flops for op in ops]),
            bytes=_total([op.bytes for op in ops]),
            peak_bytes=peak_bytes,
            busy_us=busy_us,
            idle_us={cause: step.idle_us[cause] for cause in CAUSES if cause in step.idle_us},
            overhead_share=verdict.overhead_share,
            bound=verdict.bound,
            shares=verdict.shares,
            confidence=verdict.confidence,
            experiments={
                "graph_us": step.graph_us,
                "half_batch_us": step.half_batch_us,
                "double_batch_us": step.double_batch_us,
                "why_not": dict(step.why_not),
            },
            host_us=dict(step.host_us),
        ),
        ops=tuple(ops),
        remedies=listed,
        uncounted=uncounted,
        counters=tuple(dict(counter) for counter in counters),
        notes=(*verdict.notes, *notes),
        trace=trace,
    )


def _total(counts: Sequence[int | None]) -> int | None:
    """Returns the sum of what was counted; None if nothing was."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _plain(value: Any) -> Any:
    """Returns a value that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # numpy's and torch's numbers have item()
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tuples(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Turns the lists of a dataclass's tuple fields into tuples again."""
    listed = {f.name for f in fields(kind) if str(f.type).startswith("tuple")}
    return {name: tuple(value) if name in listed else value for name, value in values.items()}
