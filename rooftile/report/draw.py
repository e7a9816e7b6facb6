"""Draws pictures as SVG text: log-log charts, loss curves, masks as tiles, and sizes on a logarithmic scale.

Colours come from the page's style sheet by class (`ours`, `standard`, `other`), so that they follow the reader's light or
dark setting. Every series also has its own marker and label, so that no information is in colour alone. A picture is
about as wide as a phone, so that its text stays readable there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from rooftile.report.tiles import TileMap
from rooftile.report.units import size, tokens

WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 14, 38
LETTER = 8.2  # the width of a label's letter on a phone, where text is larger
Write = Callable[[float], str]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line: its name, its colour class and marker (both by `kind`), and its points in data units, x rising."""

    name: str
    kind: str  # "ours", "standard" or "other"
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle on the drawing."""

    left: float
    top: float
    right: float
    bottom: float

    def holds(self, point: Point) -> bool:
        return self.left <= point[0] <= self.right and self.top <= point[1] <= self.bottom

    def meets(self, other: Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Maps a range of data to a range of the drawing."""

    low: float
    high: float
    start: float
    stop: float
    log: bool

    def place(self, value: float) -> float:
        low, high, value = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


def log_chart(
    series: Sequence[Series], *, title: str, y_name: str, write: Write, bracket: tuple[float, str] | None = None
) -> str:
    """Draws lines over sequence length, both axes logarithmic.

    bracket: a length, and words to write there between the first two series: the ratio of the title.
    """
    series = [line for line in series if line.points]
    lengths = sorted({x for line in series for x, _ in line.points})
    values = [y for line in series for _, y in line.points if y > 0]
    x_axis = Axis(
        low=lengths[0] / 1.12, high=max(lengths[-1], 2 * lengths[0]) * 1.12, start=LEFT, stop=WIDTH - RIGHT, log=True
    )
    y_axis = Axis(low=min(values) / 2, high=max(values) * 2.4, start=HEIGHT - BOTTOM, stop=TOP, log=True)
    placed = {
        line.name: [(x_axis.place(x), y_axis.place(max(y, y_axis.low))) for x, y in line.points] for line in series
    }
    taken: list[Box] = []
    parts = [_y_grid(y_axis, decades(y_axis.low, y_axis.high), write), _x_ticks(x_axis, lengths)]
    parts += [_line(line, placed[line.name], write) for line in series]
    if bracket:
        parts.append(_bracket(series, x_axis, y_axis, *bracket, taken=taken))
    parts += [_label(line, placed, taken) for line in series]
    return svg(title, f"{y_name} over sequence length", parts)


def line_chart(
    series: Sequence[Series], *, title: str, x_name: str, y_name: str, write: Write, log: bool = False
) -> str:
    """Draws curves over steps. The first is broad, so that another curve on top of it is visible."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points if not log or y > 0] or [1.0]
    low, high = min(ys), max(ys)
    low, high = (low / 2, high * 3) if log else (low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1))
    x_axis = Axis(low=min(xs), high=max(max(xs), min(xs) + 1), start=LEFT, stop=WIDTH - RIGHT, log=False)
    y_axis = Axis(low=low, high=high, start=HEIGHT - BOTTOM, stop=TOP, log=log)
    ticks = decades(low, high) if log else even(low, high)
    parts = [_y_grid(y_axis, ticks, write)]
    for x in even(x_axis.low, x_axis.high):
        parts.append(text(x_axis.place(x), HEIGHT - BOTTOM + 16, f"{x:,.0f}", "tick", "middle"))
    parts.append(text(WIDTH - RIGHT, HEIGHT - 6, x_name, "axis", "end"))
    placed = {}
    for n, line in enumerate(series):
        points = [(x_axis.place(x), y_axis.place(max(y, low))) for x, y in line.points]
        placed[line.name] = points
        broad = " broad" if n == 0 and len(series) > 1 else ""
        parts.append(f'<polyline class="line thin {line.kind}{broad}" points="{_path(points)}"/>')
    if len(series) > 1:
        for n, line in enumerate(series):
            y = TOP + 14 + 20 * n
            broad = " broad" if n == 0 else ""
            parts.append(f'<path class="line thin {line.kind}{broad}" d="M {WIDTH - 128} {y} h 26"/>')
            parts.append(text(WIDTH - 96, y + 4, line.name, f"label {line.kind}", "start"))
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


def mask_tiles(tile_map: TileMap, *, title: str, side: float = 160) -> str:
    """Draws the computed tiles of a mask: queries down, keys across."""
    scale = side / tile_map.N
    paths: dict[bool, list[str]] = {False: [], True: []}
    hatch = []
    for t, t_stop, s, s_stop, is_masked in tile_map.visits:
        x, y, width, height = (value * scale for value in (s, t, s_stop - s, t_stop - t))
        gap = min(0.8, width / 8, height / 8)
        paths[is_masked].append(
            f"M{x + gap / 2:.2f} {y + gap / 2:.2f}h{width - gap:.2f}v{height - gap:.2f}h{gap - width:.2f}z"
        )
        if is_masked:
            # colour alone would not distinguish a masked tile from an unmasked one
            hatch.append(f"M{x + gap:.2f} {y + height - gap:.2f}L{x + width - gap:.2f} {y + gap:.2f}")
    parts = [
        f'<rect class="tile skipped" width="{side:g}" height="{side:g}"/>',
        f'<path class="tile full" d="{"".join(paths[False])}"/>',
        f'<path class="tile masked" d="{"".join(paths[True])}"/>',
        f'<path class="hatch" d="{"".join(hatch)}"/>',
    ]
    return svg(title, "tiles computed, masked and skipped", parts, width=side, height=side)


def size_ladder(rows: Sequence[tuple[str, float, str]], *, title: str) -> str:
    """Draws sizes in bytes on a logarithmic scale, one per row: (what, bytes, kind)."""
    low = min(value for _, value, _ in rows) / 4
    high = max(value for _, value, _ in rows) * 4
    axis = Axis(low=low, high=high, start=0, stop=WIDTH - 76, log=True)
    parts = []
    for n, (what, value, kind) in enumerate(rows):
        y = 6 + 42 * n
        parts.append(text(0, y + 9, what, "tick", "start"))
        parts.append(
            f'<rect class="bar {kind}" x="0" y="{y + 15}" width="{max(axis.place(value), 2):.1f}" height="12" rx="3"/>'
        )
        parts.append(text(max(axis.place(value), 2) + 8, y + 26, size(value), f"label {kind}", "start"))
    return svg(title, "sizes on a logarithmic scale", parts, height=42 * len(rows) + 2)


def decades(low: float, high: float) -> list[float]:
    """Returns ticks of a logarithmic axis: powers of ten, fewer if they are crowded, and 1-2-5 steps if they are too few."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    powers = [10.0**n for n in range(first, last + 1)]
    if len(powers) > 5:
        powers = powers[:: math.ceil(len(powers) / 5)]
    if len(powers) >= 2:
        return powers
    return [m * 10.0**n for n in range(first - 1, last + 1) for m in (1, 2, 5) if low <= m * 10.0**n <= high]


def even(low: float, high: float, most: int = 6) -> list[float]:
    """Returns round ticks of a linear axis."""
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def svg(title: str, what: str, parts: Sequence[str], width: float = WIDTH, height: float = HEIGHT) -> str:
    """Returns a picture of its parts, with a description for screen readers."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}: {escape(what)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def text(x: float, y: float, words: str, kind: str, anchor: str) -> str:
    """Returns words at a position; anchor is the part of them at x: "start", "middle" or "end"."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _y_grid(axis: Axis, ticks: Sequence[float], write: Write) -> str:
    parts = []
    for tick in ticks:
        y = axis.place(tick)
        parts.append(f'<path class="grid" d="M {LEFT} {y:.1f} H {WIDTH - RIGHT}"/>')
        parts.append(text(LEFT - 7, y + 4, write(tick), "tick", "end"))
    return "".join(parts)


def _x_ticks(axis: Axis, lengths: Sequence[float]) -> str:
    parts = [text(axis.place(x), HEIGHT - BOTTOM + 16, tokens(x), "tick", "middle") for x in lengths]
    return "".join([*parts, text(WIDTH - RIGHT, HEIGHT - 6, "tokens", "axis", "end")])


def _line(line: Series, points: Sequence[Point], write: Write) -> str:
    marks = [
        _marker(line.kind, point, f"{line.name}, {x:,.0f} tokens: {write(y)}")
        for point, (x, y) in zip(points, line.points, strict=True)
    ]
    return f'<polyline class="line {line.kind}" points="{_path(points)}"/>{"".join(marks)}'


def _path(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _marker(kind: str, point: Point, words: str) -> str:
    x, y = point
    shapes = {
        "ours": f'<circle class="mark ours" cx="{x:.1f}" cy="{y:.1f}" r="4">',
        "standard": f'<rect class="mark standard" x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2">',
        "other": f'<path class="mark other" d="M {x:.1f} {y - 5:.1f} l 5 5 l -5 5 l -5 -5 z">',
    }
    shape = shapes[kind]
    return f"{shape}<title>{escape(words)}</title></{shape[1:].split(' ', 1)[0]}>"


def _bracket(series: Sequence[Series], x_axis: Axis, y_axis: Axis, length: float, words: str, taken: list[Box]) -> str:
    ends = [y for line in series[:2] for x, y in line.points if x == length]
    if len(ends) < 2:
        return ""
    x = x_axis.place(length)
    top, bottom = sorted(y_axis.place(y) for y in ends)
    # in a narrow gap the words would cover the lines
    if bottom - top < 24:
        return ""
    y = (top + bottom) / 2
    taken.append(Box(x - 8 - LETTER * 1.3 * len(words), y - 10, x, y + 10))
    return f'<path class="bracket" d="M {x:.1f} {top + 7:.1f} V {bottom - 7:.1f}"/>' + text(
        x - 6, y + 5, words, "ratio", "end"
    )


def _label(line: Series, placed: dict[str, list[Point]], taken: list[Box]) -> str:
    """Places the line's name where it covers least: above or below one of its later points."""
    width = LETTER * len(line.name)
    drawn = [point for points in placed.values() for point in _along(points)]
    best: tuple[float, Box] | None = None
    for n, (x, y) in enumerate(reversed(placed[line.name])):
        for dy in (-12, 20, -22, 30):
            left = min(max(x - width / 2, LEFT + 2), WIDTH - RIGHT - width)
            box = Box(left, y + dy - 12, left + width, y + dy + 4)
            if box.top < 0 or box.bottom > HEIGHT - BOTTOM:
                continue
            cost = sum(box.holds(point) for point in drawn) + 40 * sum(box.meets(other) for other in taken)
            cost += 0.6 * n + abs(dy) / 30
            if best is None or cost < best[0]:
                best = (cost, box)
    if best is None:
        return ""
    taken.append(best[1])
    return text(best[1].left, best[1].bottom - 4, line.name, f"label {line.kind}", "start")


def _along(points: Sequence[Point]) -> list[Point]:
    """Returns points every few units along a polyline."""
    dense = list(points)
    for (x0, y0), (x1, y1) in pairwise(points):
        count = max(int(math.hypot(x1 - x0, y1 - y0) / 3), 1)
        dense += [(x0 + (x1 - x0) * n / count, y0 + (y1 - y0) * n / count) for n in range(count)]
    return dense
