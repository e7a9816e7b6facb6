"""The text of a diagnosis, 120 columns wide: one sentence, the table of operators, and the remedies.

An operator has two lines: its numbers, and below them the verdict with what confirmed it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rooftile.diagnosis.output.causes import causes, contents
from rooftile.diagnosis.output.json_rows import Op, Program, StepSummary
from rooftile.diagnosis.output.units import count, digits, duration, percent
from rooftile.diagnosis.remedies.remedy import GRAPH, Remedy, together

WIDTH = 120
# name and width of each column; the first two are flushed left
COLUMNS = (
    ("module", 24), ("operator", 23), ("calls", 6), ("time", 9), ("share", 5), ("FLOPs", 7), ("bytes", 8), ("F/B", 6),
    ("roof", 7), ("reached", 15),
)  # fmt: skip
# the words of a verdict, below the table
LEGEND = (
    "slope: how much of added arithmetic the time shows (0: none, as memory bounds it; 1: all of it). gain: the share of the "
    "time that goes away with its traffic to main memory. fixed part: the share that stays at size zero. reached: the share of "
    "the roof, which is the nearer limit of this machine."
)
# a remedy's effect on what the program computes
CHANGES = {"nothing": "", "rounding": "; results change by rounding", "memory": "; takes another amount of memory"}
PHASES = {"forward": "", "backward": "bwd ", "optimiser": "opt "}


def text(
    program: Program, step: StepSummary, ops: Sequence[Op], remedies: Sequence[Remedy], *,
    uncounted: Sequence[str] = (), counters: Sequence[Mapping[str, Any]] = (), notes: Sequence[str] = (), rows: int = 20,
) -> str:  # fmt: skip
    """Returns the whole text.

    rows: operators to show, most expensive first.
    """
    lines = [*wrap(f"{sentence(step, ops, remedies)} {contents(ops)}"), ""]
    for number, cause in enumerate(causes(step, ops, remedies), 1):
        lines += wrap(f"{cause.head()}.", indent="   ", first=f"{number}. ")
        lines += [*wrap(f"{cause.advice(step.time_us)}{_changed(cause.remedy)}", indent="     ", first="   > "), ""]
    if ops:
        lines += [_line([name for name, _ in COLUMNS]), "-" * WIDTH]
    shown = ops[:rows]
    for op in shown:
        lines += [_line(_cells(op)), *wrap(_verdict(op, remedies), indent="    ")]
    if len(ops) > rows:
        rest = ops[rows:]
        lines.append(f"... and {len(rest)} more: {duration(sum(op.time_us for op in rest))}")
    if any(op.confidence != "modelled" for op in shown):
        lines += ["", *wrap(LEGEND)]
    if remedies:
        lines += ["", *_remedies(step, remedies)]
    if counters:
        lines += ["", "One call by Nsight Compute's counters"]
        lines += [line for row in counters for line in wrap(counted(row), indent="    ", first="  ")]
    if uncounted:
        lines += ["", *wrap(f"Not counted, because no rule has their formula: {', '.join(uncounted)}.")]
    for note in notes:
        lines += ["", *wrap(f"Note: {note}.")]
    lines += ["", f"{program.step} of `{program.command}`, {program.mode}, torch {program.torch}"]
    return "\n".join(lines)


def sentence(step: StepSummary, ops: Sequence[Op], remedies: Sequence[Remedy] = ()) -> str:
    """Returns the diagnosis in a sentence or two."""
    words = f"Step {duration(step.time_us)}: {_held_up(step, ops)}"
    graph_us = step.experiments.get("graph_us")
    if graph_us is not None:
        words += f": replayed as a CUDA graph it takes {duration(graph_us)}"
    elif graph := next((r for r in remedies if r.name == GRAPH), None):
        words += f": as a CUDA graph it would take {duration(step.time_us - graph.predicted_us)}"
    words += "."
    if "experiments" in step.experiments.get("why_not", {}):
        words += f" By model only: {step.experiments['why_not']['experiments']}."
    device = _asked_for(ops)
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


def _asked_for(ops: Sequence[Op]) -> str:
    """Names the work that the host asks for: kernels of a GPU, operators of a CPU."""
    return "kernels" if any(op.kernels for op in ops) else "operators"


def _held_up(step: StepSummary, ops: Sequence[Op]) -> str:
    launches, waits = "", step.shares.get("host", 0.0)
    if step.launches:
        each = step.between_us / step.launches
        unit, them = ("launches", "kernels") if _asked_for(ops) == "kernels" else ("operators", "them")
        gaps = f", {duration(each)} between {them}" if step.idle_us and step.launches > 1 else ""
        launches = f" ({step.launches:,} {unit if step.launches > 1 else unit[:-1]}{gaps})"
    host = f", {percent(waits)} waiting for data or a synchronisation" if waits >= 0.005 else ""
    exchange = step.idle_us.get("exchange", 0.0) / (step.time_us or 1.0)
    host += f", {percent(exchange)} waiting for other processes" if exchange >= 0.005 else ""
    if step.overhead_share is None:
        return f"overhead unknown{launches}{host}"
    return f"{percent(step.overhead_share)} overhead{launches}{host}"


def _bound_by(bound: str) -> str:
    if bound in ("memory", "compute", "overhead", "latency", "communication"):
        return f"are bound by {bound}"
    return {"host": "wait for the host", "balanced": "lie between two bounds"}.get(bound, "have no verdict")


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
    if (alone := alone_words(op)) is not None:
        words.append(alone)
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


def alone_words(op: Op) -> str | None:
    """Returns how long a call takes alone, where that differs from its time in the step."""
    alone_us = op.experiments.get("alone", {}).get("time_us")
    if op.in_context_us is None or alone_us is None:
        return None
    return f"a call takes {duration(op.in_context_us / op.calls)} in the step and {duration(alone_us)} alone"


def _remedies(step: StepSummary, remedies: Sequence[Remedy]) -> list[str]:
    lines = ["Remedies"]
    for remedy in remedies:
        basis = "computed" if remedy.measured_us is None else "tried"
        saves = f"{_saving(remedy.saving_us)} ({percent(abs(remedy.saving_us) / step.time_us)}), {basis}"
        lines += wrap(f"{remedy.name}: {saves}; {remedy.how}{CHANGES[remedy.changes]}", indent="    ", first="  ")
    applied = together(remedies, step.time_us)
    total = sum(us for _, us in applied)
    if len(remedies) > 1:
        names = ", ".join(remedy.name for remedy, _ in applied)
        words = f"together at most {duration(total)}, leaving {duration(step.time_us - total)}: {names}"
        lines += wrap(words, indent="    ", first="  ")
    return lines


BUSY = {"dram_percent": "in main memory", "l2_percent": "in L2", "sm_percent": "in multiprocessors"}


def counted(row: Mapping[str, Any]) -> str:
    """Returns one operator's predicted numbers beside the numbers of the counters."""
    words = [
        f"{count(row['bytes'], 'B')} predicted, {count(row['dram_bytes'], 'B')} counted in main memory and "
        f"{count(row['l2_bytes'], 'B')} in L2"
    ]
    if row.get("tensor_flops") is not None:
        words.append(f"{count(row['flops'], 'FLOPs')} predicted, {count(row['tensor_flops'], 'FLOPs')} counted in tensor cores")
    busy = ", ".join(f"{row[key]:.0f} % {name}" for key, name in BUSY.items())
    words.append(f"of their peak rates {busy}")
    return f"{row['module']} {row['op'].split('::')[-1]}: {'; '.join(words)}".lstrip()


def _changed(remedy: Remedy | None) -> str:
    return "" if remedy is None else CHANGES[remedy.changes]


def _saving(us: float) -> str:
    return f"saves {duration(us)}" if us >= 0 else f"takes {duration(-us)} more"


def _short(op: Op) -> str:
    return op.op.split("::")[-1]


def wrap(words: str, indent: str = "", first: str | None = None) -> list[str]:
    """Breaks words into lines of the table's width."""
    return textwrap.wrap(
        words, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent, break_on_hyphens=False
    )  # fmt: skip
