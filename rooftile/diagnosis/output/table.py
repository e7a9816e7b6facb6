"""The text of a diagnosis, 120 columns wide: one sentence, the table of operators, and the remedies.

An operator has two lines: its numbers, and below them the verdict with what confirmed it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rooftile.diagnosis.output.rows import Op, Program, Step
from rooftile.diagnosis.output.units import count, digits, duration, percent
from rooftile.diagnosis.remedies.remedy import GRAPH, Remedy, together

WIDTH = 120
# name and width of each column; the first two are flushed left
COLUMNS = (
    ("module", 24), ("operator", 23), ("calls", 6), ("time", 9), ("share", 5), ("FLOPs", 7), ("bytes", 8), ("F/B", 6),
    ("roof", 7), ("reached", 15),
)  # fmt: skip
PHASES = {"forward": "", "backward": "bwd ", "optimiser": "opt "}


def text(
    program: Program, step: Step, ops: Sequence[Op], remedies: Sequence[Remedy], *,
    uncounted: Sequence[str] = (), counters: Sequence[Mapping[str, Any]] = (), notes: Sequence[str] = (), rows: int = 20,
) -> str:  # fmt: skip
    """Returns the whole text.

    rows: operators to show, most expensive first.
    """
    lines = [*wrap(sentence(step, ops, remedies)), ""]
    if ops:
        lines += [_line([name for name, _ in COLUMNS]), "-" * WIDTH]
    for op in ops[:rows]:
        lines += [_line(_cells(op)), *wrap(_verdict(op, remedies), indent="    ")]
    if len(ops) > rows:
        rest = ops[rows:]
        lines.append(f"... and {len(rest)} more: {duration(sum(op.time_us for op in rest))}")
    if remedies:
        lines += ["", *_remedies(step, remedies)]
    if counters:
        lines += ["", "Bytes of one call: predicted, and counted in main memory and in L2"]
        for row in counters:
            predicted, dram, l2 = (count(row[word], "B") for word in ("bytes", "dram_bytes", "l2_bytes"))
            lines += wrap(f"{row['module']} {row['op'].split('::')[-1]}: {predicted}, {dram}, {l2}", indent="    ", first="  ")
    if uncounted:
        lines += ["", *wrap(f"Not counted, because no rule has their formula: {', '.join(uncounted)}.")]
    for note in notes:
        lines += ["", *wrap(f"Note: {note}.")]
    lines += ["", f"{program.step} of `{program.command}`, {program.mode}, torch {program.torch}"]
    return "\n".join(lines)


def sentence(step: Step, ops: Sequence[Op], remedies: Sequence[Remedy] = ()) -> str:
    """Returns the diagnosis in a sentence or two."""
    words = f"Step {duration(step.time_us)}: {_held_up(step)}"
    graph_us = step.experiments.get("graph_us")
    if graph_us is not None:
        words += f": replayed as a CUDA graph it takes {duration(graph_us)}"
    elif graph := next((r for r in remedies if r.name == GRAPH), None):
        words += f": as a CUDA graph it would take {duration(step.time_us - graph.predicted_us)}"
    words += "."
    device = "kernels" if any(op.kernels for op in ops) else "operators"
    total = sum(op.time_us for op in ops)
    shares: dict[str, list[Op]] = {}
    for op in ops:
        shares.setdefault(op.bound or "unknown", []).append(op)
    if not total:
        return words
    times = {bound: sum(op.time_us for op in its) / total for bound, its in shares.items()}
    # a part of less than half a per cent would read 0 %
    ranked = [bound for bound in sorted(times, key=lambda bound: -times[bound]) if times[bound] >= 0.005]
    parts: list[str] = []
    for bound in ranked:
        phrase = _bound_by(bound)
        # the verb once is enough
        phrase = phrase.removeprefix("are bound ") if any("are bound by" in part for part in parts) else phrase
        parts.append(f"{percent(times[bound])} {phrase} ({_leading(shares[bound])})")
    busy_us = step.busy_us if step.busy_us is not None else total
    return f"{words} Of the {duration(busy_us)} of {device} {', '.join(parts)}."


def _held_up(step: Step) -> str:
    launches = ""
    if step.launches:
        each = sum(step.idle_us.values()) / step.launches
        gaps = f", {duration(each)} between them" if step.idle_us else ""
        launches = f" ({step.launches:,} launches{gaps})"
    waits = step.shares.get("host", 0.0)
    host = f", {percent(waits)} waiting for data or a synchronisation" if waits >= 0.005 else ""
    if step.overhead_share is None:
        return f"overhead unknown{launches}{host}"
    return f"{percent(step.overhead_share)} overhead{launches}{host}"


def _bound_by(bound: str) -> str:
    if bound in ("memory", "compute", "overhead", "latency", "communication"):
        return f"are bound by {bound}"
    return {"host": "wait for the host", "balanced": "are balanced"}.get(bound, "have no verdict")


def _leading(ops: Sequence[Op], most: int = 3) -> str:
    """Returns the names of the operators that take the most time."""
    times: dict[str, float] = {}
    for op in ops:
        times[_short(op)] = times.get(_short(op), 0.0) + op.time_us
    names = sorted(times, key=lambda name: -times[name])
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _cells(op: Op) -> list[str]:
    reached = "-"
    if op.achieved is not None:
        unit = "B/s" if op.roof in ("HBM", "DRAM", "L2", "cache") else "/s" if op.roof == "special" else "F/s"
        reached = f"{percent(op.roof_share)} {count(op.achieved, unit)}"
    return [
        op.module or "(step)",
        PHASES.get(op.phase, "") + _short(op),
        f"{op.calls:,}",
        duration(op.time_us),
        percent(op.share),
        count(op.flops),
        count(op.bytes, "B"),
        "-" if op.intensity is None else digits(op.intensity),
        op.roof or "-",
        reached,
    ]


def _line(cells: Sequence[str]) -> str:
    parts: list[str] = []
    for i, (cell, (_, width)) in enumerate(zip(cells, COLUMNS, strict=True)):
        # the end of a module's path says more than its beginning, and the beginning of an operator's name more than its end
        if len(cell) > width:
            cell = "…" + cell[1 - width :] if i == 0 else cell[: width - 1] + "…" if i == 1 else cell
        parts.append(cell.ljust(width) if i < 2 else cell.rjust(width))
    return " ".join(parts).rstrip()


def _verdict(op: Op, remedies: Sequence[Remedy]) -> str:
    bound = f"{op.bound} ({op.unit})" if op.bound and op.unit else op.bound or "no verdict"
    words = [f"{bound}, {op.confidence}: {op.confirmed_by}"]
    if op.in_context_us is not None:
        words.append(f"in the step {duration(op.in_context_us)}")
    if op.where:
        words.append(op.where)
    # a remedy that was tried and costs time is none
    saving = [remedies[n] for n in op.remedies if remedies[n].saving_us > 0]
    if saving:
        best = max(saving, key=lambda remedy: remedy.saving_us)
        count_others = len(best.ops) - 1
        others = f" here and in {count_others} other row{'s' * (count_others > 1)}" if count_others else ""
        words.append(f"{best.name} saves {duration(best.saving_us)}{others}")
    return "; ".join(words)


def _remedies(step: Step, remedies: Sequence[Remedy]) -> list[str]:
    lines = ["Remedies"]
    for remedy in remedies:
        measured = "" if remedy.measured_us is None else f", measured {_saving(remedy.measured_us)}"
        saves = f"{duration(remedy.predicted_us)} ({percent(remedy.predicted_us / step.time_us)}){measured}"
        changes = "" if remedy.changes == "nothing" else f"; changes {remedy.changes}"
        lines += wrap(f"{remedy.name}: saves {saves}; {remedy.how}{changes}", indent="    ", first="  ")
    applied = together(remedies, step.time_us)
    total = sum(us for _, us in applied)
    if len(remedies) > 1:
        names = ", ".join(remedy.name for remedy, _ in applied)
        words = f"together at most {duration(total)}, leaving {duration(step.time_us - total)}: {names}"
        lines += wrap(words, indent="    ", first="  ")
    return lines


def _saving(us: float) -> str:
    return duration(us) if us >= 0 else f"{duration(-us)} more time"


def _short(op: Op) -> str:
    return op.op.split("::")[-1]


def wrap(words: str, indent: str = "", first: str | None = None) -> list[str]:
    """Breaks words into lines of the table's width."""
    return textwrap.wrap(
        words, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent, break_on_hyphens=False
    )  # fmt: skip
