"""Finds places for words in a picture, where they cover no point, no line and no other words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rooftile.drawing.svg import Point

# a small label on a phone, where text is larger
LETTER, LINE = 7.7, 14.0
# room that stays free around a label
MARGIN = 1.5


class Box(NamedTuple):
    """A rectangle in the drawing; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    @classmethod
    def of_words(cls, words: str, x: float, y: float, anchor: str) -> Box:
        """Returns the box of words whose baseline begins, has its middle or ends at a point."""
        width = LETTER * len(words)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        return cls(left, y - 0.75 * LINE, left + width, y + 0.25 * LINE)


class Crowd:
    """The things in a picture that words must not cover.

    bounds: the part of the picture that words may use.

    Example:
        >>> crowd = Crowd(Box(0, 0, 100, 100))
        >>> crowd.circle(50, 50, 10)
        >>> crowd.put("12", [(50, 54, "middle"), (64, 54, "start")])
        (64, 54, 'start')
    """

    def __init__(self, bounds: Box) -> None:
        self._bounds = bounds
        self._circles: list[tuple[float, float, float]] = []
        self._lines: list[tuple[Point, Point]] = []
        self._boxes: list[Box] = []

    def circle(self, x: float, y: float, radius: float) -> None:
        self._circles.append((x, y, radius))

    def line(self, start: Point, end: Point) -> None:
        self._lines.append((start, end))

    def put(self, words: str, places: Iterable[tuple[float, float, str]]) -> tuple[float, float, str] | None:
        """Returns the first place (x, y of the baseline, anchor) that is free, and keeps it free; None if none is."""
        for x, y, anchor in places:
            box = Box.of_words(words, x, y, anchor)
            if self._is_free(box):
                self._boxes.append(box)
                return x, y, anchor
        return None

    def _is_free(self, box: Box) -> bool:
        inside = self._bounds
        if box.left < inside.left or box.right > inside.right or box.top < inside.top or box.bottom > inside.bottom:
            return False
        wide = Box(box.left - MARGIN, box.top - MARGIN, box.right + MARGIN, box.bottom + MARGIN)
        return not (
            any(_overlap(wide, other) for other in self._boxes)
            or any(_touches(wide, *circle) for circle in self._circles)
            or any(_crosses(wide, *line) for line in self._lines)
        )


def around(x: float, y: float, radius: float) -> list[tuple[float, float, str]]:
    """Returns places for a short label near a circle: right, left, above, below, at the corners, then further away."""
    found: list[tuple[float, float, str]] = []
    for gap in (3.0, 8.0, 14.0):
        reach, corner = radius + gap, 0.75 * (radius + gap)
        found += [
            (x + reach, y + 4, "start"), (x - reach, y + 4, "end"), (x, y - reach, "middle"), (x, y + reach + 9, "middle"),
            (x + corner, y - corner, "start"), (x - corner, y - corner, "end"), (x + corner, y + corner + 8, "start"),
            (x - corner, y + corner + 8, "end"),
        ]  # fmt: skip
    return found


def _overlap(one: Box, other: Box) -> bool:
    return one.left < other.right and other.left < one.right and one.top < other.bottom and other.top < one.bottom


def _touches(box: Box, x: float, y: float, radius: float) -> bool:
    near_x, near_y = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
    return (near_x - x) ** 2 + (near_y - y) ** 2 < radius**2


def _crosses(box: Box, start: Point, end: Point) -> bool:
    """Clips the line at the four sides (Liang and Barsky): what is left of it lies in the box."""
    first, last = 0.0, 1.0
    for low, high, a, b in ((box.left, box.right, start[0], end[0]), (box.top, box.bottom, start[1], end[1])):
        step = b - a
        if step == 0:
            if not low < a < high:
                return False
            continue
        enter, leave = sorted(((low - a) / step, (high - a) / step))
        first, last = max(first, enter), min(last, leave)
    return first < last
