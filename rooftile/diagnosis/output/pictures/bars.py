"""Bars of time: what a step spends it on, and what remedies take off it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from rooftile.diagnosis.output.json_rows import Op, StepSummary
from rooftile.diagnosis.remedies.remedy import Remedy, together
from rooftile.drawing.labels import LETTER
from rooftile.drawing.page import Chart, Table, safe
from rooftile.drawing.svg import svg, text
from rooftile.drawing.units import duration, percent

WIDTH = 480
ROW = 44
NAMES = {
    "busy": "busy", "host": "waiting for the host", "exchange": "other processes", "sync": "a synchronisation", "copy": "a copy",
    "dependency": "a kernel that was late", "rest": "not explained",
}  # fmt: skip
# a part below this share is not worth a word
LEAST = 0.001
LONGEST = 46  # letters of a name
# a bar that is longer than this many steps ends at the edge
MOST = 1.5


def time_line(step: StepSummary, ops: Sequence[Op]) -> Chart | None:
    """Draws one step as two bars: busy and idle by cause, and its time by verdict."""
    parts_us = _parts(step, ops)
    total = sum(parts_us.values())
    if not total:
        return None
    shares = {name: share * step.time_us for name, share in step.shares.items() if share}
    rows = [("busy, and idle by cause", {(NAMES.get(name, name), f"part-{name}"): us for name, us in parts_us.items()})]
    if shares:
        rows.append(("by verdict", {(name, f"point {name}"): us for name, us in shares.items()}))
    total = max(total, *(sum(parts.values()) for _, parts in rows))
    drawn, y = [], 0.0
    for name, parts in rows:
        drawn.append(text(0, y + 12, name, "tick", "start"))
        drawn.append(_stack(parts, total, y + 18))
        words, y = _names(parts, total, y + 18 + 22 + 18)
        drawn.append(words)
        y += 14
    title = f"{duration(step.time_us)} per step"
    cells = [[name, duration(us), percent(us / total)] for _, parts in rows for (name, _), us in parts.items()]
    table = Table(["", "time", "share"], cells)
    return Chart(title, safe(svg(title, "time by cause", drawn, WIDTH, y - 8)), "", table)


def waterfall(step: StepSummary, remedies: Sequence[Remedy]) -> Chart | None:
    """Draws the step, what each remedy takes off it, predicted and measured, and what is left."""
    if not remedies or not step.time_us:
        return None
    applied = {id(remedy): adds for remedy, adds in together(remedies, step.time_us)}
    longest = max([step.time_us, *(step.time_us - (r.measured_us or 0.0) for r in remedies)])
    longest = min(longest, MOST * step.time_us)
    scale = (WIDTH - 2) / longest
    parts, left, y = [_bar("now", duration(step.time_us), 0.0, step.time_us, "soft", scale, 0)], step.time_us, float(ROW)
    ordered = sorted(remedies, key=lambda r: (id(r) not in applied, -r.saving_us))
    for remedy in ordered:
        # one that takes the same time as another, or none, is drawn from the whole step
        end = left if id(remedy) in applied else step.time_us
        words = f"predicted {duration(remedy.predicted_us)}"
        measured = remedy.measured_us
        more = " more time" if measured is not None and measured < 0 else ""
        words += "" if measured is None else f", measured {duration(abs(measured))}{more}"
        words += "" if id(remedy) in applied else ", alone"
        parts.append(_bar(remedy.name, words, max(0.0, end - remedy.predicted_us), end, "predicted", scale, y))
        if measured is not None:
            start, stop = sorted((min(max(0.0, end - measured), longest), end))
            kind = "ours" if measured >= 0 else "standard"
            parts.append(_rect(f"bar {kind}", start * scale, y + 21, (stop - start) * scale, 8))
        left -= applied.get(id(remedy), 0.0)
        y += ROW
    parts.append(_bar("after all that add up", duration(left), 0.0, left, "soft", scale, y))
    title = f"{duration(step.time_us - left)} of {duration(step.time_us)} could go" if applied else "No remedy saves time"
    note = (
        "Pale: the predicted saving. Narrow and dark: the measured one, where the remedy was applied; red, it took longer. "
        "Remedies that take away the same time exclude each other: the smaller is marked alone, and is not in the sum."
    )
    return Chart(title, safe(svg(title, "savings", parts, WIDTH, y + ROW)), note)


def _parts(step: StepSummary, ops: Sequence[Op]) -> dict[str, float]:
    busy = step.busy_us if step.busy_us is not None else sum(op.time_us for op in ops)
    found = {"busy": busy} | {cause: us for cause, us in step.idle_us.items() if us}
    rest = step.time_us - sum(found.values())
    return found | ({"rest": rest} if rest > LEAST * step.time_us else {})


def _stack(parts: Mapping[tuple[str, str], float], total: float, y: float) -> str:
    drawn, x = [], 0.0
    for (name, kind), us in parts.items():
        width = us / total * WIDTH
        words = f"{name}: {duration(us)}, {percent(us / total)}"
        drawn.append(_rect(f"stack {kind}", x, y, width, 22, words))
        x += width
    return "".join(drawn)


def _names(parts: Mapping[tuple[str, str], float], total: float, y: float) -> tuple[str, float]:
    """The names of a bar's parts below it, in as many lines as they need; and where they end."""
    drawn, x = [], 0.0
    for (name, kind), us in parts.items():
        words = f"{name} {duration(us)}, {percent(us / total)}"
        width = 26 + LETTER * len(words)
        if x and x + width > WIDTH:
            x, y = 0.0, y + 18
        drawn.append(_rect(f"stack {kind}", x, y - 10, 11, 11))
        drawn.append(text(x + 16, y, words, "tick", "start"))
        x += width
    return "".join(drawn), y + 4


def _bar(name: str, words: str, start: float, stop: float, kind: str, scale: float, y: float) -> str:
    name = name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
    label = f'<text class="tick" x="0" y="{y + 12:.1f}">{escape(name)}: <tspan class="value">{escape(words)}</tspan></text>'
    return label + _rect(f"bar {kind}", start * scale, y + 18, (stop - start) * scale, 14)


def _rect(kind: str, x: float, y: float, width: float, height: float, words: str = "") -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 1.0):.1f}" height="{height:g}"'
    return f'<rect class="{escape(kind)}" {size}><title>{escape(words)}</title></rect>'
