"""The roofline of one machine: its measured ceilings, and the operators of a step under them.

Williams, Waterman and Patterson, Roofline: an insightful visual performance model for multicore architectures, 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from rooftile.diagnosis.output.json_rows import Op, StepSummary
from rooftile.diagnosis.output.pictures.roofs import DrawnRoof, Spot, roofs, spot, under
from rooftile.diagnosis.remedies.remedy import DTYPE, Remedy
from rooftile.drawing.labels import Box, Crowd, around
from rooftile.drawing.page import Chart, Table, safe
from rooftile.drawing.svg import Axis, arrow, decades, svg, text
from rooftile.drawing.units import count, duration, number, percent, size

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 380, 62, 12, 10, 40
LARGEST, SMALLEST = 17.0, 2.5  # radii of points
# operators are drawn, most expensive first, until they have so much of the time
DRAWN = 0.98
# titles for ceilings that were not measured
TITLES = {"datasheet": "The roofline of a datasheet", "none": "The operators, without roofs"}


def roofline(
    ceilings: Mapping[str, Any], step: StepSummary, ops: Sequence[Op], remedies: Sequence[Remedy], names: Sequence[str],
    on_gpu: bool,
    raised: bool = True,
) -> Chart | None:  # fmt: skip
    """Draws the roofline; None where no operator has FLOPs and bytes.

    names: of the operators, for the reader.
    raised: draw a roof where an operator was faster than it was measured; else the roofs stay as they are, and the note says so.
    """
    counted = [(n, op, where) for n, op in enumerate(ops) if (where := spot(op)) is not None]
    if not counted:
        return None
    spots = _leading(counted)
    highest = roofs(ceilings, ops, on_gpu)
    lines = highest if raised else [replace(roof, rate=roof.measured or roof.rate, measured=None) for roof in highest]
    moves = _moves(step, ops, remedies, lines)
    x_axis, y_axis = _axes([where for *_, where in spots] + [end for *ends, _ in moves for end in ends], lines)
    crowd = Crowd(Box(LEFT + 2, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM - 2))
    longest = max(op.time_us for _, op, _ in spots)
    circles = []
    for n, op, where in spots:
        radius = max(SMALLEST, LARGEST * math.sqrt(op.time_us / longest))
        circles.append((n, op, x_axis.place(where.x), y_axis.place(where.y), radius))
        crowd.circle(*circles[-1][2:])
    parts = [_grid(x_axis, y_axis)]
    for roof in lines:
        parts.append(_roof(roof, x_axis, y_axis, crowd))
    parts += [_arrow(*move, x_axis, y_axis, crowd) for move in moves]
    parts += [_circle(op, names[n], *where) for n, op, *where in circles]
    parts += [_roof_words(roof, x_axis, y_axis, crowd) for roof in lines]
    parts += [_move_words(*move, x_axis, y_axis, crowd) for move in moves]
    without = 0
    for n, _, x, y, radius in circles:
        place = crowd.put(str(n + 1), around(x, y, radius))
        without += place is None
        parts += [text(place[0], place[1], str(n + 1), "tick", place[2])] if place else []
    table = Table(
        ["operator", "FLOPs per byte", "rate", "bytes per second", "time"],
        [
            [f"{n + 1} {names[n]}", number(x), count(y, "FLOP/s"), count(y / x, "B/s"), duration(op.time_us)]
            for n, op, (x, y) in spots
        ]
        + [[roof.words, "", "", "", ""] for roof in lines],
    )
    title = TITLES.get(ceilings.get("kind", ""), "The roofline of this machine")
    picture = svg(title, "FLOP/s over FLOPs per byte", parts, WIDTH, HEIGHT)
    note = _note(lines, moves, without, len(counted) - len(spots), len(ops) - len(counted))
    if any(roof.measured for roof in highest) and not raised:
        note += " A point above the roof of memory was served by a cache."
    return Chart(title, safe(picture), note, table)


def _leading(counted: Sequence[tuple[int, Op, Spot]]) -> list[tuple[int, Op, Spot]]:
    total, so_far, chosen = sum(op.time_us for _, op, _ in counted), 0.0, []
    for one in sorted(counted, key=lambda one: -one[1].time_us):
        chosen.append(one)
        so_far += one[1].time_us
        if so_far >= DRAWN * total:
            break
    return chosen


def _note(lines: Sequence[DrawnRoof], moves: Sequence[object], without: int, small: int, left_out: int) -> str:
    words = [
        "Each point is a row of the table, with its number; its area is its time. A slanted roof is memory, a level "
        "one arithmetic."
    ]
    if moves:
        words.append(
            "Arrows: the operators of a remedy together, before and after it was tried; upwards is faster. FLOPs and bytes are "
            "the program's before."
        )
    for roof in lines:
        if roof.measured:
            was = count(roof.measured, "B/s" if roof.is_memory else "FLOP/s")
            words.append(f"The roof of {roof.name} was measured as {was}; an operator was faster, and it is drawn there.")
    if without:
        words.append(f"{without} points are too close to others for their number: hover over them.")
    hidden = [f"{left_out} without FLOPs (copies, for example) or counts"] * bool(left_out)
    hidden += [f"{small} with {percent(1 - DRAWN)} of the time"] * bool(small)
    words += [f"Rows that are not drawn: {' and '.join(hidden)}."] * bool(hidden)
    return " ".join(words)


def _axes(spots: Sequence[Spot], lines: Sequence[DrawnRoof]) -> tuple[Axis, Axis]:
    memory = [roof.rate for roof in lines if roof.is_memory]
    peaks = [roof.rate for roof in lines if not roof.is_memory]
    ridges = [peak / rate for rate in memory for peak in peaks]
    xs, ys = [where.x for where in spots] + ridges, [where.y for where in spots]
    low, high = min(xs) / 3, max(xs) * 4
    bottom = min([*ys, *(min(xs) * rate for rate in memory)]) / 3
    return (
        Axis(low=low, high=high, start=LEFT, stop=WIDTH - RIGHT, log=True),
        Axis(low=bottom, high=max([*ys, *peaks]) * 3, start=HEIGHT - BOTTOM, stop=TOP, log=True),
    )


def _grid(x_axis: Axis, y_axis: Axis) -> str:
    parts = []
    for tick in decades(y_axis.low, y_axis.high):
        y = y_axis.place(tick)
        parts.append(f'<path class="grid" d="M {LEFT} {y:.1f} H {WIDTH - RIGHT}"/>')
        parts.append(text(LEFT - 7, y + 4, count(tick), "tick", "end"))
    for tick in decades(x_axis.low, x_axis.high):
        words = number(tick) if tick >= 1e-3 else f"{tick:.0e}"
        parts.append(text(x_axis.place(tick), HEIGHT - BOTTOM + 16, words, "tick", "middle"))
    parts.append(text(WIDTH - RIGHT, HEIGHT - 6, "FLOPs per byte", "axis", "end"))
    parts.append(text(0, HEIGHT - 6, "FLOP/s", "axis", "start"))
    return "".join(parts)


def _ends(roof: DrawnRoof, x_axis: Axis, y_axis: Axis) -> tuple[tuple[float, float], tuple[float, float]]:
    """The ends of a roof within the picture, in the drawing: a memory's line ends at the top."""
    low, high = x_axis.low, x_axis.high
    if roof.is_memory:
        low = max(low, y_axis.low / roof.rate)
        high = min(high, y_axis.high / roof.rate)
    return (x_axis.place(low), y_axis.place(roof.at(low))), (x_axis.place(high), y_axis.place(roof.at(high)))


def _roof(roof: DrawnRoof, x_axis: Axis, y_axis: Axis, crowd: Crowd) -> str:
    (x1, y1), (x2, y2) = _ends(roof, x_axis, y_axis)
    crowd.line((x1, y1), (x2, y2))
    kind = "roof slanted" if roof.is_memory else "roof"
    words = escape(roof.words)
    return f'<path class="{kind}" d="M {x1:.1f} {y1:.1f} L {x2:.1f} {y2:.1f}"><title>{words}</title></path>'


def _roof_words(roof: DrawnRoof, x_axis: Axis, y_axis: Axis, crowd: Crowd) -> str:
    """Writes a roof's name beside its line, where there is room."""
    (x1, y1), (x2, y2) = _ends(roof, x_axis, y_axis)
    shares = [n / 24 for n in range(25)]
    if roof.is_memory:
        along = [(x1 + s * (x2 - x1), y1 + s * (y2 - y1)) for s in shares]
        places = [(x - gap, y - gap + 2, "end") for gap in (6, 12) for x, y in along]
        places += [(x + gap, y + gap + 4, "start") for gap in (8, 14, 20) for x, y in along]
    else:
        along = [(x2 - s * (x2 - x1), y1) for s in shares]
        places = [(x, y - 5, "end") for x, y in along] + [(x, y + 13, "end") for x, y in along]
    place = crowd.put(roof.words, places)
    return text(place[0], place[1], roof.words, "tick", place[2]) if place else ""


def _move_words(before: Spot, after: Spot, words: str, x_axis: Axis, y_axis: Axis, crowd: Crowd) -> str:
    """Writes the remedy's name beside its arrow, where there is room."""
    (x1, y1), (x2, y2) = ((x_axis.place(s.x), y_axis.place(max(s.y, y_axis.low))) for s in (before, after))
    name = words.partition(":")[0]
    ends = [(x2, y2), ((x1 + x2) / 2, (y1 + y2) / 2), (x1, y1)]
    place = crowd.put(name, [spot for x, y in ends for spot in around(x, y, 6.0)])
    return text(place[0], place[1], name, "tick", place[2]) if place else ""


def _circle(op: Op, name: str, x: float, y: float, radius: float) -> str:
    counts = f"{count(op.flops or 0)} FLOPs, {size(op.bytes or 0)}"
    words = escape(f"{name}: {duration(op.time_us)}, {counts}, {op.bound or 'no verdict'}")
    kind = escape(f"point {op.bound or 'unknown'}")
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>{words}</title></circle>'


def _moves(
    step: StepSummary, ops: Sequence[Op], remedies: Sequence[Remedy], lines: Sequence[DrawnRoof]
) -> list[tuple[Spot, Spot, str]]:
    """Before and after of each remedy that was applied: its operators together, or the step."""
    found = []
    for remedy in remedies:
        its = [ops[n] for n in remedy.ops if n < len(ops)] or list(ops)
        counted = [op for op in its if op.flops and op.bytes]
        before_us = sum(op.time_us for op in its) if remedy.ops else step.time_us
        flops, moved = sum(op.flops or 0 for op in counted), sum(op.bytes or 0 for op in its)
        if remedy.measured_us is None or not flops or not moved or before_us <= max(0.0, remedy.measured_us):
            continue
        after_us = before_us - remedy.measured_us
        before, after = Spot(flops / moved, flops / before_us * 1e6), Spot(flops / moved, flops / after_us * 1e6)
        words = f"{remedy.name.removeprefix(f'{DTYPE}: ')}: {duration(before_us)} before, {duration(after_us)} after"
        found.append((before, under(after, lines), words))
    return found


def _arrow(before: Spot, after: Spot, words: str, x_axis: Axis, y_axis: Axis, crowd: Crowd) -> str:
    start, end = ((x_axis.place(s.x), y_axis.place(max(s.y, y_axis.low))) for s in (before, after))
    crowd.line(start, end)
    return arrow(start, end, words)
