"""Draws pictures as SVG text: log-log charts, loss curves, bars, and masks as tiles.

Colours come from the page's style sheet by class (`ours`, `standard`, `other`), so that they follow the reader's light or
dark setting. Every series also has its own marker and a name in the legend, so that no information is in colour alone. A picture is
about as wide as a phone, so that its text stays readable there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from rooftile.report.tiles import TileMap
from rooftile.report.units import tokens

WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 28, 38
LETTER = 8.2  # the width of a legend's letter on a phone, where text is larger
Write = Callable[[float], str]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line: its name, its colour class and marker (both by `kind`), and its points in data units, x rising."""

    name: str
    kind: str  # "ours", "standard" or "other"
    points: tuple[Point, ...]


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


def log_chart(series: Sequence[Series], *, title: str, y_name: str, write: Write) -> str:
    """Draws lines over sequence length, both axes logarithmic."""
    series = [line for line in series if line.points]
    lengths = sorted({x for line in series for x, _ in line.points})
    values = [y for line in series for _, y in line.points if y > 0]
    x_axis = Axis(
        low=lengths[0] / 1.12, high=max(lengths[-1], 2 * lengths[0]) * 1.12, start=LEFT, stop=WIDTH - RIGHT, log=True
    )
    y_axis = Axis(low=min(values) / 2, high=max(values) * 2, start=HEIGHT - BOTTOM, stop=TOP, log=True)
    parts = [_y_grid(y_axis, decades(y_axis.low, y_axis.high), write), _x_ticks(x_axis, lengths)]
    for line in series:
        points = [(x_axis.place(x), y_axis.place(max(y, y_axis.low))) for x, y in line.points]
        parts.append(_line(line, points, write))
    parts.append(_legend([(line.name, line.kind) for line in series]))
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
    for n, line in enumerate(series):
        points = [(x_axis.place(x), y_axis.place(max(y, low))) for x, y in line.points]
        broad = " broad" if n == 0 and len(series) > 1 else ""
        parts.append(f'<polyline class="line thin {line.kind}{broad}" points="{_path(points)}"/>')
    if len(series) > 1:
        parts.append(_legend([(line.name, line.kind) for line in series], marks=False))
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


def _legend(names: Sequence[tuple[str, str]], marks: bool = True) -> str:
    """Draws the names of the series above the picture, where they cover nothing."""
    parts, x = [], float(LEFT)
    for name, kind in names:
        parts.append(f'<path class="line {kind}" d="M {x:.1f} 10 h 24"/>')
        parts += [_marker(kind, (x + 12, 10.0), name)] if marks else []
        parts.append(text(x + 30, 14, name, f"label {kind}", "start"))
        x += 44 + LETTER * len(name)
    return "".join(parts)
