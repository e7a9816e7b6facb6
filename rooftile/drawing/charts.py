"""Charts as SVG text: log-log charts over a length, curves over steps, bars, and points on one scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rooftile.drawing.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    LETTER,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Point,
    Write,
    decades,
    even,
    legend,
    marker,
    path,
    svg,
    text,
    y_grid,
)  # fmt: skip
from rooftile.drawing.units import tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line: its name, its colour class and marker (both by `kind`), and its points in data units, x rising."""

    name: str
    kind: str  # "ours", "standard", "other", "third", or "due" for what a model expects
    points: tuple[Point, ...]


# the least distance of two names, and the width of a letter of a small name on a phone
APART, NAME = 15.0, 7.0
# a line through fewer points says nothing that a sentence does not
FEWEST = 3


def enough(series: Sequence[Series]) -> bool:
    """Whether lines have enough points to be drawn: one of them three or more."""
    return any(len(line.points) >= FEWEST for line in series)


def log_chart(
    series: Sequence[Series], *, title: str, y_name: str, write: Write, x_name: str = "tokens", ticks: Sequence[float] = (),
    mark: float | None = None, rings: Sequence[tuple[str, Point, str]] = (), named: bool = False,
) -> str:  # fmt: skip
    """Draws lines over sequence length or another count, both axes logarithmic.

    ticks: on the horizontal axis; without them one at each point.
    mark: a place on the horizontal axis, between the first point and the last, for a dotted line with its number.
    rings: around points, each with its kind and words for the reader who points at it.
    named: whether names stand to the right of the lines, and the quantity above them, instead of a legend.
    """
    series = [line for line in series if line.points]
    lengths = sorted({x for line in series for x, _ in line.points})
    values = [y for line in series for _, y in line.points if y > 0] + [y for _, (_, y), _ in rings]
    stop = WIDTH - RIGHT - (room_of_names(series) if named else 0)
    x_axis = Axis(low=lengths[0] / 1.12, high=max(lengths[-1], 2 * lengths[0]) * 1.12, start=LEFT, stop=stop, log=True)
    y_axis = Axis(low=min(values) / 2, high=max(values) * 2, start=HEIGHT - BOTTOM, stop=TOP, log=True)
    parts = [y_grid(y_axis, decades(y_axis.low, y_axis.high), write), _x_ticks(x_axis, ticks or lengths, x_name)]
    if mark is not None:
        parts.append(_mark(x_axis.place(mark), f"{mark:,.0f}"))
    for line in series:
        points = [(x_axis.place(x), y_axis.place(max(y, y_axis.low))) for x, y in line.points]
        parts.append(_line(line, points, write, x_name))
    parts += _rings(rings, x_axis, y_axis)
    if named:
        parts += [text(4, 14, y_name, "axis", "start"), *names_at_ends(series, x_axis, y_axis)]
    else:
        parts.append(legend([(line.name, line.kind) for line in series]))
    return svg(title, f"{y_name} over {x_name}", parts)


def line_chart(
    series: Sequence[Series], *, title: str, x_name: str, y_name: str, write: Write, log: bool = False,
    marks: bool = False, rings: Sequence[tuple[str, Point, str]] = (),
) -> str:  # fmt: skip
    """Draws curves over steps: without marks the first is broad, so that another curve on top of it is visible.

    marks: whether each point has a marker with its numbers.
    rings: around points, each with its kind and words for the reader who points at it.
    """
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points if not log or y > 0] + [y for _, (_, y), _ in rings] or [1.0]
    low, high = min(ys), max(ys)
    low, high = (low / 2, high * 3) if log else (low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1))
    x_axis = Axis(low=min(xs), high=max(max(xs), min(xs) + 1), start=LEFT, stop=WIDTH - RIGHT, log=False)
    y_axis = Axis(low=low, high=high, start=HEIGHT - BOTTOM, stop=TOP, log=log)
    ticks = decades(low, high) if log else even(low, high)
    parts = [y_grid(y_axis, ticks, write)]
    for x in even(x_axis.low, x_axis.high):
        parts.append(text(x_axis.place(x), HEIGHT - BOTTOM + 16, f"{x:,.0f}", "tick", "middle"))
    parts.append(text(WIDTH - RIGHT, HEIGHT - 6, x_name, "axis", "end"))
    for n, line in enumerate(series):
        points = [(x_axis.place(x), y_axis.place(max(y, low))) for x, y in line.points]
        if marks:
            parts.append(_line(line, points, write, x_name))
            continue
        broad = " broad" if n == 0 and len(series) > 1 else ""
        parts.append(f'<polyline class="line thin {line.kind}{broad}" points="{path(points)}"/>')
    parts += _rings(rings, x_axis, y_axis)
    if len(series) > 1:
        parts.append(legend([(line.name, line.kind) for line in series], marks=marks))
    return svg(title, f"{y_name} over {x_name}", parts)


def bars(rows: Sequence[tuple[str, str, float, str]], *, title: str) -> str:
    """Draws horizontal bars from zero: (name, kind, value, words), all of one quantity."""
    longest = max(value for *_, value, _ in rows) or 1.0
    parts = []
    for n, (name, kind, value, words) in enumerate(rows):
        y = 8 + 46 * n
        width = max(value / longest * (WIDTH - 100), 2)
        parts.append(text(0, y + 8, name, "tick", "start"))
        parts.append(f'<rect class="bar {kind}" x="0" y="{y + 14}" width="{width:.1f}" height="18" rx="3"/>')
        parts.append(text(width + 8, y + 28, words, f"label {kind}", "start"))
    return svg(title, "bars", parts, height=46 * len(rows) + 4)


def points(
    rows: Sequence[tuple[str, str, float]], *, title: str, x_name: str, write: Write, mark: tuple[float, str] | None = None
) -> str:
    """Draws one point per row on a common scale, for numbers whose differences count and whose distance from zero does not.

    rows: (name, kind, value) each.
    mark: a place on the scale for a dashed line, and its words.
    """
    values = [value for *_, value in rows] + ([mark[0]] if mark else [])
    room = 0.06 * (max(values) - min(values) or 1.0)
    top, step, left = 26.0 if mark else 8.0, 26.0, 8 + NAME * max(len(name) for name, *_ in rows)
    bottom = top + step * len(rows)
    # numbers stand to the right of their points
    axis = Axis(low=min(values) - room, high=max(values) + room, start=left, stop=WIDTH - 44, log=False)
    parts = []
    for tick in even(axis.low, axis.high, most=4):
        parts.append(f'<path class="grid" d="M {axis.place(tick):.1f} {top:g} V {bottom:g}"/>')
        parts.append(text(axis.place(tick), bottom + 16, write(tick), "tick", "middle"))
    if mark is not None:
        x = axis.place(mark[0])
        parts.append(f'<path class="line due dashed" d="M {x:.1f} {top:g} V {bottom:g}"/>')
        parts.append(text(min(x, WIDTH - 44), top - 8, mark[1], "tick", "middle"))
    for n, (name, kind, value) in enumerate(rows):
        y = top + step * (n + 0.5)
        parts.append(text(0, y + 4, name, "tick", "start"))
        parts.append(marker(kind, (axis.place(value), y), f"{name}: {write(value)}"))
        parts.append(text(axis.place(value) + 9, y + 4, write(value), f"label {kind}", "start"))
    parts.append(text(WIDTH - RIGHT, bottom + 34, x_name, "axis", "end"))
    return svg(title, x_name, parts, height=bottom + 40)


def names_at_ends(series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> list[str]:
    """Writes the name of each line to the right of its end, and names that would overlap below each other."""
    parts, last = [], -math.inf
    for line in sorted(series, key=lambda line: -line.points[-1][1]):
        x, y = line.points[-1]
        last = max(y_axis.place(y) + 4, last + APART)
        parts.append(text(x_axis.place(x) + 9, last, line.name, f"label {line.kind}", "start"))
    return parts


def room_of_names(series: Sequence[Series]) -> float:
    """Returns the room that `names_at_ends` needs to the right of the horizontal axis."""
    return LETTER * max(len(line.name) for line in series)


def _rings(rings: Sequence[tuple[str, Point, str]], x_axis: Axis, y_axis: Axis) -> list[str]:
    return [
        f'<circle class="ring {kind}" cx="{x_axis.place(x):.1f}" cy="{y_axis.place(y):.1f}" r="8"><title>{words}</title></circle>'
        for kind, (x, y), words in rings
    ]


def _x_ticks(axis: Axis, lengths: Sequence[float], name: str) -> str:
    parts = [text(axis.place(x), HEIGHT - BOTTOM + 16, tokens(x), "tick", "middle") for x in lengths]
    return "".join([*parts, text(WIDTH - RIGHT, HEIGHT - 6, name, "axis", "end")])


def _mark(x: float, words: str) -> str:
    """Draws a dotted line from the bottom to the top, with words beside its foot."""
    line = f'<path class="bracket" d="M {x:.1f} {TOP} V {HEIGHT - BOTTOM}"/>'
    return line + text(x + 5, HEIGHT - BOTTOM - 6, words, "tick", "start")


def _line(line: Series, points: Sequence[Point], write: Write, x_name: str) -> str:
    marks = [
        marker(line.kind, point, f"{line.name}, {x:,.0f} {x_name}: {write(y)}")
        for point, (x, y) in zip(points, line.points, strict=True)
    ]
    return f'<polyline class="line {line.kind}" points="{path(points)}"/>{"".join(marks)}'
