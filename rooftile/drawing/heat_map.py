"""A heat map as SVG text: a square for each number, its colour by the number over a scale that the picture shows."""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.drawing.svg import WIDTH, Write, svg, text

LEFT, TOP, BOTTOM = 54, 30, 22
# no colour is so pale that a square seems to be missing
PALEST = 0.04


def heat_map(
    rows: Sequence[Sequence[float]], *, title: str, row_name: str, column_name: str, scale: Sequence[float], write: Write
) -> str:
    """Draws rows of numbers from the top.

    rows: equally many numbers in each, at least 0.
    row_name, column_name: words for one row and one column, such as "layer" and "expert".
    scale: rising numbers from 0 that the scale above the picture shows; what is larger than the last has its colour.
    write: formats a number.
    """
    columns, top = max(len(row) for row in rows), scale[-1]
    width = (WIDTH - LEFT) / columns
    height = max(min(2.2 * width, 26.0), 14.0)
    parts = _scale(scale, write)
    for n, row in enumerate(rows):
        y = TOP + n * height
        parts.append(text(LEFT - 8, y + height / 2 + 4, f"{row_name} {n + 1}", "tick", "end"))
        for m, value in enumerate(row):
            words = f"{row_name} {n + 1}, {column_name} {m + 1}: {write(value)}"
            parts.append(_square(LEFT + m * width, y, width, height, value / top, words))
    bottom = TOP + height * len(rows)
    names = f"{columns} {column_name}s, the busiest first"
    parts.append(text(WIDTH, bottom + 15, names, "axis", "end"))
    return svg(title, f"a square for each {column_name} of each {row_name}", parts, height=bottom + BOTTOM)


def _scale(scale: Sequence[float], write: Write) -> list[str]:
    """Draws a square for each number of the scale, with the number to its right."""
    parts, step = [], (WIDTH - LEFT) / len(scale)
    for n, value in enumerate(scale):
        x = LEFT + n * step
        more = " or more" if n == len(scale) - 1 else ""
        parts.append(_square(x, 4, 16, 14, value / scale[-1], f"{write(value)}{more}"))
        parts.append(text(x + 22, 15, f"{write(value)}{more}", "tick", "start"))
    return parts


def _square(x: float, y: float, width: float, height: float, share: float, words: str) -> str:
    share = PALEST + (1 - PALEST) * min(share, 1.0)
    place = f'x="{x + 0.5:.1f}" y="{y + 0.5:.1f}" width="{width - 1:.1f}" height="{height - 1:.1f}"'
    return f'<rect class="heat" {place} fill-opacity="{share:.2f}"><title>{words}</title></rect>'
