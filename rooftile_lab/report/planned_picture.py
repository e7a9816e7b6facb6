"""The picture of a plan: the products of a model on the machine's roofline for several numbers of rows, and below it the format
that each is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from rooftile.drawing.labels import Box, Crowd
from rooftile.drawing.page import Chart, Table, safe
from rooftile.drawing.svg import Axis, Point, arrow, decades, legend, marker, svg, text
from rooftile.drawing.units import count, duration, number, percent
from rooftile_lab.report.planned import ROWS, Planned, Product

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 310, 54, 14, 28, 40
# lines of the choices below the roofline, and where the columns of the numbers of rows begin
LINE, COLUMNS = 19.0, (86, 192, 298)
KINDS = dict(zip(ROWS, ("third", "rose", "gold"), strict=True))
# roofs nearer to each other than this are one line
SAME = 1.05


def chart(found: Planned) -> Chart:
    """Draws the plan, with a table of the choices and their times."""
    roofs = _roofs(found)
    x_axis, y_axis = _axes(found.products, roofs)
    crowd = Crowd(Box(LEFT + 2, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM - 2))
    spots = [(one, _place(one.flops, one.nbytes, one.time_us, x_axis, y_axis)) for one in found.products]
    for _, spot in spots:
        crowd.circle(*spot, 5.0)
    moves = [_move(one, spot, x_axis, y_axis, crowd) for one, spot in spots if one.changes]
    lines = [(words, *_ends(rate, is_memory, x_axis, y_axis), is_memory) for words, rate, is_memory in roofs]
    for _, start, end, _ in lines:
        crowd.line(start, end)
    parts = [_grid(x_axis, y_axis), *(_roof(*line, crowd) for line in lines), *moves]
    parts += [marker(KINDS[one.rows], spot, _words(one)) for one, spot in spots]
    parts.append(legend([(_rows(rows), kind) for rows, kind in KINDS.items()]))
    names = list(dict.fromkeys(one.name for one in found.products))
    parts += _choices(found, names)
    title, height = claim(found), HEIGHT + 14 + LINE * (len(names) + 1)
    picture = svg(title, "FLOP/s over FLOPs per byte, and the chosen formats", parts, WIDTH, height)
    return Chart(title, safe(picture), note(found), table(found))


def claim(found: Planned) -> str:
    """Returns the picture's title, from what was chosen."""
    changed = sum(one.changes for one in found.products)
    if not changed:
        return f"Planned for 1, 16 and 256 rows, every product of this Llama stays in {found.dtype}"
    return f"Planned for 1, 16 and 256 rows, {changed} of {len(found.products)} products change their format"


def note(found: Planned) -> str:
    """Says what was chosen, and why nothing was where that is so."""
    changed = sum(one.changes for one in found.products)
    sentences = [
        f"rooftile.plan of the model in full precision, for 1, 16 and 256 answers that decode at once, and at most {found.most_loss:g} nats "
        "per byte: the least measured time. Left of the bend a product waits for memory, right of it for arithmetic."
    ]
    if changed:
        losses = ", ".join(f"{loss:+.4f}" for loss in found.losses)
        sentences.append(f"Arrows lead to the chosen formats; with all of them the model loses {losses} nats per byte.")
    elif found.on_gpu:
        sentences.append(f"Everything stays in {found.dtype}: no format that is allowed is faster on products so small.")
    else:
        sentences.append(
            f"Everything stays in {found.dtype}: a CPU computes formats by their definitions, which are slower than its own product."
        )
    return " ".join(sentences)


def table(found: Planned) -> Table:
    """The format of each product at each number of rows, with the share of its time."""
    names = list(dict.fromkeys(one.name for one in found.products))
    cells = {(one.name, one.rows): _choice(one) for one in found.products}
    head = ["product", *map(_rows, ROWS)]
    return Table(head, [[name, *(cells[name, rows] for rows in ROWS)] for name in names])


def _rows(rows: int) -> str:
    return f"{rows} row{'s' * (rows > 1)}"


def _choices(found: Planned, names: Sequence[str]) -> list[str]:
    """Writes the format of each product, a column for each number of rows, with its share of the time as it is."""
    top = HEIGHT + 14
    parts = [text(x, top, _rows(rows), f"label {KINDS[rows]}", "start") for rows, x in zip(ROWS, COLUMNS, strict=True)]
    cells = {(one.name, one.rows): one for one in found.products}
    for n, name in enumerate(names, 1):
        y = top + LINE * n
        parts.append(f'<path class="grid" d="M 0 {y - 14:.1f} H {WIDTH}"/>')
        parts.append(text(0, y, name, "tick", "start"))
        for rows, x in zip(ROWS, COLUMNS, strict=True):
            one = cells[name, rows]
            mixed = "/".join(dict.fromkeys(one.chosen))
            words = f"{mixed}, {percent(one.chosen_us / one.time_us)}" if one.changes and "/" not in mixed else mixed
            parts.append(text(x, y, words, "value" if one.changes else "tick", "start"))
    return parts


def _choice(one: Product) -> str:
    if not one.changes:
        return f"{one.words}, {duration(one.time_us)}"
    return f"{one.words}, {duration(one.chosen_us)} of {duration(one.time_us)}"


def _words(one: Product) -> str:
    becomes = f"{one.words} in {duration(one.chosen_us)}" if one.changes else f"stays {one.words}"
    return f"{one.name}, {_rows(one.rows)}: {duration(one.time_us)}, {number(one.flops / one.nbytes)} FLOPs per byte; {becomes}"


def _roofs(found: Planned) -> list[tuple[str, float, bool]]:
    """The lines: words, rate, and whether it is a memory's. None is below a product that was measured."""
    ceilings, products = found.ceilings, found.products
    rates = {name: 1e12 * rate for name, rate in ceilings["matmul_tflops"].items() if rate}
    own = rates[found.dtype]
    peaks = {name: rate for name, rate in rates.items() if name == found.dtype or (found.on_gpu and rate > SAME * own)}
    fastest = max(one.flops / one.time_us * 1e6 for one in products)
    peaks[found.dtype] = max(own, fastest)
    widest = max(one.nbytes / one.time_us * 1e6 for one in products)
    memories = {
        "HBM" if found.on_gpu else "DRAM": 1e9 * ceilings["copy_gbs"],
        "L2" if found.on_gpu else "cache": max(1e9 * ceilings["cache_gbs"], widest),
    }
    lines = [(f"{name} {count(rate, 'B/s')}", rate, True) for name, rate in memories.items()]
    # where several would be drawn on each other, the first is
    for name, rate in sorted(peaks.items(), key=lambda peak: peak[0] != found.dtype):
        if all(is_memory or abs(math.log(rate / other)) > math.log(SAME) for _, other, is_memory in lines):
            lines.append((f"{name} {count(rate)}", rate, False))
    return lines


def _axes(products: Sequence[Product], roofs: Sequence[tuple[str, float, bool]]) -> tuple[Axis, Axis]:
    xs = [one.flops / moved for one in products for moved in (one.nbytes, one.chosen_bytes)]
    ys = [one.flops / us * 1e6 for one in products for us in (one.time_us, one.chosen_us)]
    peak = max(rate for _, rate, is_memory in roofs if not is_memory)
    bend = peak / min(rate for _, rate, is_memory in roofs if is_memory)
    return (
        Axis(low=min(xs) / 2, high=max(*xs, bend) * 2.5, start=LEFT, stop=WIDTH - RIGHT, log=True),
        Axis(low=min(ys) / 3, high=max(*ys, peak) * 2.5, start=HEIGHT - BOTTOM, stop=TOP, log=True),
    )


def _place(flops: float, moved: float, us: float, x_axis: Axis, y_axis: Axis) -> Point:
    return x_axis.place(flops / moved), y_axis.place(flops / us * 1e6)


def _grid(x_axis: Axis, y_axis: Axis) -> str:
    parts = []
    for tick in decades(y_axis.low, y_axis.high):
        y = y_axis.place(tick)
        parts.append(f'<path class="grid" d="M {LEFT} {y:.1f} H {WIDTH - RIGHT}"/>')
        parts.append(text(LEFT - 7, y + 4, count(tick), "tick", "end"))
    for tick in decades(x_axis.low, x_axis.high):
        parts.append(text(x_axis.place(tick), HEIGHT - BOTTOM + 16, number(tick), "tick", "middle"))
    parts.append(text(WIDTH - RIGHT, HEIGHT - 6, "FLOPs per byte", "axis", "end"))
    parts.append(text(0, HEIGHT - 6, "FLOP/s", "axis", "start"))
    return "".join(parts)


def _ends(rate: float, is_memory: bool, x_axis: Axis, y_axis: Axis) -> tuple[Point, Point]:
    """The ends of a roof within the picture: a memory's line ends at the top."""
    low, high = x_axis.low, x_axis.high
    if is_memory:
        low, high = max(low, y_axis.low / rate), min(high, y_axis.high / rate)
    start, end = ((x_axis.place(x), y_axis.place(rate * x if is_memory else rate)) for x in (low, high))
    return start, end


def _roof(words: str, start: Point, end: Point, is_memory: bool, crowd: Crowd) -> str:
    """Draws a roof, with its words where there is room: a memory's near its foot, a peak's near its end."""
    steps = range(17) if is_memory else range(16, -1, -1)
    along = [(start[0] + n / 16 * (end[0] - start[0]), start[1] + n / 16 * (end[1] - start[1])) for n in steps]
    if is_memory:
        places = [(x + gap, y + gap + 2, "start") for gap in (8, 16) for x, y in along]
        places += [(x - 8, y - 4, "end") for x, y in along[11::-1]]
    else:
        places = [(x, y + gap, "end") for gap in (-5, -10, 13, 20) for x, y in along]
    place = crowd.put(words, places)
    kind, path = "roof slanted" if is_memory else "roof", f"M {start[0]:.1f} {start[1]:.1f} L {end[0]:.1f} {end[1]:.1f}"
    line = f'<path class="{kind}" d="{path}"><title>{escape(words)}</title></path>'
    return line + (text(place[0], place[1], words, "tick", place[2]) if place else "")


def _move(one: Product, spot: Point, x_axis: Axis, y_axis: Axis, crowd: Crowd) -> str:
    """An arrow from a product as it is to what it becomes."""
    end = _place(one.flops, one.chosen_bytes, one.chosen_us, x_axis, y_axis)
    crowd.line(spot, end)
    return arrow(spot, end, _words(one))
