"""The intensity sweep of an operator: more arithmetic on the same bytes, and its time. The verdict rests on this curve."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rooftile.diagnosis.output.json_rows import Op
from rooftile.drawing.labels import LETTER
from rooftile.drawing.page import Chart, Table, safe
from rooftile.drawing.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Point, even, path, svg, text, y_grid
from rooftile.drawing.units import duration, number, percent

# a time must rise so much above the first for its curve to have a knee
RISES = 1.5


def sweep_chart(op: Op, name: str) -> Chart | None:
    """Draws the sweep of one operator; None if it has fewer than two points."""
    points = sweep_points(op)
    if len(points) < 2:
        return None
    own = points[0][1]
    most = points[-1][0] * 1.04
    x_axis = Axis(low=0.0, high=most, start=LEFT, stop=WIDTH - RIGHT, log=False)
    y_axis = Axis(low=0.0, high=1.05 * max(own + most, *(t for _, t in points)), start=HEIGHT - BOTTOM, stop=TOP, log=False)

    def line(kind: str, through: Sequence[Point]) -> str:
        return f'<polyline class="line {kind}" points="{path([(x_axis.place(x), y_axis.place(y)) for x, y in through])}"/>'

    parts = [y_grid(y_axis, even(y_axis.low, y_axis.high), duration)]
    parts += [
        text(x_axis.place(x), HEIGHT - BOTTOM + 16, duration(x), "tick", "middle")
        for x in even(0.0, most, 5)
        if x_axis.place(x) < WIDTH - RIGHT - 16
    ]
    parts.append(text(WIDTH - RIGHT, HEIGHT - 6, "time of the added arithmetic alone", "axis", "end"))
    parts.append(line("standard dashed", [(0.0, own), (most, own + most)]))
    parts.append(line("other dashed", [(0.0, own), (min(own, most), own), *([(most, most)] if most > own else [])]))
    knee = knee_us(points)
    if knee is not None and knee > 0.02 * most:
        x = x_axis.place(knee)
        words = escape(f"knee: time rises from {duration(knee)} of added arithmetic")
        parts.append(f'<path class="bracket" d="M {x:.1f} {TOP + 4} V {HEIGHT - BOTTOM}"><title>{words}</title></path>')
    parts.append(line("ours", points))
    for x, y in points:
        words = escape(f"{duration(x)} added: {duration(y)}")
        cx, cy = x_axis.place(x), y_axis.place(y)
        parts.append(f'<circle class="mark ours" cx="{cx:.1f}" cy="{cy:.1f}" r="4"><title>{words}</title></circle>')
    parts.append(_legend())
    rows = [[duration(x), duration(y)] for x, y in points]
    picture = svg(name, "time over added arithmetic", parts)
    return Chart(name, safe(picture), _note(op), Table(["added", "time"], rows))


def sweep_points(op: Op) -> list[Point]:
    """Returns added arithmetic and time of one call, in µs, without unknown times; the first has nothing added."""
    sweep = op.experiments.get("intensity", {})
    pairs = zip(sweep.get("added_us") or (), sweep.get("time_us") or (), strict=False)
    known = sorted((x, y) for x, y in pairs if x is not None and y is not None and y > 0)
    return known if known and known[-1][0] > 0 else []


def knee_us(points: Sequence[Point]) -> float | None:
    """Returns the added arithmetic at which the flat part meets the rising one; None if the curve does not rise.

    Far beyond the knee time rises as the added arithmetic does, so the first point and the last give it.
    """
    own, (added, last) = points[0][1], points[-1]
    return min(max(own + added - last, 0.0), added) if last >= RISES * own else None


def _note(op: Op) -> str:
    sweep = op.experiments.get("intensity", {})
    words = [f"{op.bound or 'no verdict'}{f' ({op.unit})' if op.unit else ''}, {op.confidence}."]
    if sweep.get("slope") is not None:
        words.append(f"Slope {number_of(sweep['slope'])}.")
    if sweep.get("knee_flops_per_byte") is not None:
        words.append(f"Knee at {number_of(sweep['knee_flops_per_byte'])} FLOPs per byte.")
    gain = op.experiments.get("cache", {}).get("gain")
    if gain is not None:
        words.append(f"Gain from the cache: {percent(gain)}.")
    return " ".join(words)


def number_of(value: float) -> str:
    """Formats a number that may be negative."""
    return number(value) if value >= 0 else f"−{number(-value)}"


def _legend() -> str:
    parts, x = [], float(LEFT)
    for name, kind in (("measured", "ours"), ("if memory", "other dashed"), ("if compute", "standard dashed")):
        parts.append(f'<path class="line {kind}" d="M {x:.1f} 10 h 22"/>')
        parts.append(text(x + 27, 14, name, "tick", "start"))
        x += 38 + LETTER * len(name)
    return "".join(parts)
