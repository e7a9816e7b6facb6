"""The parts of a picture as SVG text: axes with their ticks, words, markers and legends.

Colours come from the page's style sheet by class (`ours`, `standard`, `other`), so that they follow the reader's light or
dark setting. Every series also has its own marker and a name in the legend, so that no information is in colour alone. A
picture is about as wide as a phone, so that its text stays readable there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 28, 38
LETTER = 8.2  # the width of a legend's letter on a phone, where text is larger
Write = Callable[[float], str]
Point = tuple[float, float]


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


def y_grid(axis: Axis, ticks: Sequence[float], write: Write) -> str:
    parts = []
    for tick in ticks:
        y = axis.place(tick)
        parts.append(f'<path class="grid" d="M {LEFT} {y:.1f} H {WIDTH - RIGHT}"/>')
        parts.append(text(LEFT - 7, y + 4, write(tick), "tick", "end"))
    return "".join(parts)


def path(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def marker(kind: str, point: Point, words: str) -> str:
    x, y = point
    shapes = {
        "ours": f'<circle class="mark ours" cx="{x:.1f}" cy="{y:.1f}" r="4">',
        "standard": f'<rect class="mark standard" x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2">',
        "other": f'<path class="mark other" d="M {x:.1f} {y - 5:.1f} l 5 5 l -5 5 l -5 -5 z">',
        "third": f'<path class="mark third" d="M {x:.1f} {y - 5:.1f} l 4.6 8 l -9.2 0 z">',
        "rose": f'<rect class="mark rose" x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2">',
        "gold": f'<circle class="mark gold" cx="{x:.1f}" cy="{y:.1f}" r="4">',
        "olive": f'<path class="mark olive" d="M {x:.1f} {y + 5:.1f} l 4.6 -8 l -9.2 0 z">',
        "mauve": f'<path class="mark mauve" d="M {x:.1f} {y - 5:.1f} l 5 5 l -5 5 l -5 -5 z">',
        "due": f'<circle class="mark due" cx="{x:.1f}" cy="{y:.1f}" r="2.5">',
    }
    shape = shapes[kind]
    return f"{shape}<title>{escape(words)}</title></{shape[1:].split(' ', 1)[0]}>"


def arrow(start: Point, end: Point, words: str) -> str:
    """Returns an arrow, with words for the reader who points at it; a very short one has no head."""
    (x1, y1), (x2, y2) = start, end
    length = math.hypot(x2 - x1, y2 - y1)
    head = ""
    if length > 4:
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        left, right = (x2 - 8 * ux - 4 * uy, y2 - 8 * uy + 4 * ux), (x2 - 8 * ux + 4 * uy, y2 - 8 * uy - 4 * ux)
        head = f" M {left[0]:.1f} {left[1]:.1f} L {x2:.1f} {y2:.1f} L {right[0]:.1f} {right[1]:.1f}"
    way = f"M {x1:.1f} {y1:.1f} L {x2:.1f} {y2:.1f}{head}"
    return f'<path class="move" d="{way}"><title>{escape(words)}</title></path>'


def legend(names: Sequence[tuple[str, str]], marks: bool = True) -> str:
    """Draws the names of the series above the picture, where they cover nothing; long ones begin further to the left."""
    width = sum(44 + LETTER * len(name) for name, _ in names)
    parts, x = [], max(4.0, min(float(LEFT), WIDTH - width))
    for name, kind in names:
        parts.append(f'<path class="line {kind}" d="M {x:.1f} 10 h 24"/>')
        parts += [marker(kind, (x + 12, 10.0), name)] if marks else []
        parts.append(text(x + 30, 14, name, f"label {kind}", "start"))
        x += 44 + LETTER * len(name)
    return "".join(parts)
