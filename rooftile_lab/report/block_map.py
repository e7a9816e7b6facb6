"""Pictures of block tables: all blocks of a cache over the steps, and the tables of several answers in one step.

Each request has its own hue; the page's style sheet derives light and dark tones from it (`owner`). A tooltip over each
request's blocks gives the same information in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from rooftile.drawing.svg import BOTTOM, LEFT, RIGHT, WIDTH, Axis, even, svg, text
from rooftile_lab.report.block_tables import BLOCK, Frame, Samples
from rooftile_lab.report.serving import Served

HEIGHT = 330
TOP = 28
# hues at perceptually equal distances: a third of the plain colour wheel looks green
HUES = (0, 26, 45, 75, 135, 178, 205, 230, 262, 290, 325, 360)
GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Span:
    """A block while one request owns it, from step `start`."""

    block: int
    request: int
    start: int
    filled: list[int]  # slots with a token, step by step
    tables: list[int]  # tables that contain it, step by step

    @property
    def stop(self) -> int:
        return self.start + len(self.filled)


def hue_of(request: int) -> str:
    """Returns a request's hue in degrees. Neighbours differ strongly, and every request has its own hue."""
    turn, part = divmod(request * GOLDEN_RATIO % 1 * (len(HUES) - 1), 1)
    low, high = HUES[int(turn) : int(turn) + 2]
    return f"{low + part * (high - low):.1f}"


def spans(frames: Sequence[Frame]) -> list[Span]:
    """Returns every block of every request."""
    found: list[Span] = []
    going: dict[int, Span] = {}
    for step, frame in enumerate(frames):
        cells = frame.cells()
        for block in going.keys() - cells.keys():
            del going[block]
        for block, cell in cells.items():
            if block not in going or going[block].request != cell.request:
                going[block] = Span(block, cell.request, step, [], [])
                found.append(going[block])
            going[block].filled.append(cell.filled)
            going[block].tables.append(cell.tables)
    return found


def block_map(served: Served, *, title: str, blocks: int, steps: int) -> str:
    """Draws the blocks over time: steps across, blocks down. `steps` is the length of the axis, equal for compared pictures."""
    x = Axis(low=0, high=steps, start=LEFT, stop=WIDTH - RIGHT, log=False)
    y = Axis(low=0, high=blocks, start=TOP, stop=HEIGHT - BOTTOM, log=False)
    end = x.place(served.steps)
    parts = [f'<rect class="tile skipped" x="{LEFT}" y="{TOP}" width="{end - LEFT:.1f}" height="{y.stop - TOP}"/>']
    for tick in even(0, blocks):
        parts.append(text(LEFT - 7, y.place(tick) + 4, f"{tick:,.0f}", "tick", "end"))
    for tick in even(0, steps):
        parts.append(text(x.place(tick), HEIGHT - BOTTOM + 16, f"{tick:,.0f}", "tick", "middle"))
    parts.append(text(LEFT - 7, 12, "block", "axis", "end"))
    parts.append(text(WIDTH - RIGHT, HEIGHT - 6, "step", "axis", "end"))
    if served.steps < 0.8 * steps:
        parts.append(text(end + 8, TOP + 16, f"done at step {served.steps:,}", "tick", "start"))
    by_request = sorted(spans(served.frames), key=lambda span: span.request)
    for request, owned in groupby(by_request, key=lambda span: span.request):
        parts.append(_owner(request, list(owned), x, y))
    return svg(title, "blocks of the cache over steps, coloured by request", parts, height=HEIGHT)


def _owner(request: int, owned: list[Span], x: Axis, y: Axis) -> str:
    """Draws all blocks of one request."""
    start, stop = min(span.start for span in owned), max(span.stop for span in owned)
    words = f"request {request + 1}: {len({span.block for span in owned})} blocks, steps {start:,} to {stop:,}"
    room, filled, shared = [], [], []
    # slightly less than a row, so that rows are visible
    height = 0.85 * (y.place(1) - y.place(0))
    for span in owned:
        left, width = x.place(span.start), x.place(span.stop) - x.place(span.start)
        bottom = y.place(span.block) + height
        room.append(f"M{left:.1f} {bottom:.2f}v{-height:.2f}h{width:.1f}v{height:.2f}z")
        outline = [(x.place(step), bottom - height * slots / BLOCK) for step, slots in _corners(span)]
        filled.append(f"M{left:.1f} {bottom:.2f}" + "".join(f"L{a:.1f} {b:.2f}" for a, b in outline) + f"V{bottom:.2f}z")
        begun = span.start
        for is_shared, run in groupby(span.tables, key=lambda tables: tables > 1):
            ended = begun + len(list(run))
            if is_shared:
                shared.append(f"M{x.place(begun):.1f} {bottom - height / 2:.2f}H{x.place(ended):.1f}")
            begun = ended
    return (
        f'<g class="owner" style="--hue:{hue_of(request)}"><title>{escape(words)}</title><path class="room" d="{"".join(room)}"/>'
        f'<path class="filled" d="{"".join(filled)}"/><path class="shared" d="{"".join(shared)}"/></g>'
    )


def _corners(span: Span) -> list[tuple[int, int]]:
    """Returns the corners of the curve of filled slots: (step, slots), from the first step to the end of the last."""
    course = [*span.filled, span.filled[-1]]
    return [
        (span.start + n, slots)
        for n, slots in enumerate(course)
        if n in (0, len(course) - 1) or course[n - 1] + course[n + 1] != 2 * slots
    ]


def sample_tables(samples: Samples, *, title: str) -> str:
    """Draws the block tables of several answers, one row each, with a block number per cell; shared blocks are solid."""
    left, top, row = 66, 22, 30
    columns = max(len(table.blocks) for table in samples.tables)
    width = min((WIDTH - left) / columns, 44)
    owners = Counter(block for table in samples.tables for block in table.blocks)
    parts = [text(left, 12, "blocks of keys and values, in the order of the text", "axis", "start")]
    for n, table in enumerate(samples.tables):
        y = top + row * n
        parts.append(text(0, y + 17, f"answer {n + 1}", "tick", "start"))
        for column, block in enumerate(table.blocks):
            kind = "filled" if owners[block] > 1 else "room"
            x = left + column * width
            parts.append(f'<rect class="cell {kind}" x="{x + 1:.1f}" y="{y}" width="{width - 2:.1f}" height="{row - 5}" rx="3"/>')
            parts.append(text(x + width / 2, y + 17, str(block), f"number {kind}", "middle"))
    owner = f'<g class="owner" style="--hue:{hue_of(samples.tables[0].request)}">{"".join(parts)}</g>'
    return svg(title, "the block tables of several answers to one prompt", [owner], height=top + row * len(samples.tables))
