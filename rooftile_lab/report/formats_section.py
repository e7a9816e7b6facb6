"""The section of the page about formats: curves of losses, losses against bytes, and a plan. Its sentences are long lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rooftile.drawing.charts import Series, line_chart
from rooftile.drawing.page import Chart, Table, safe
from rooftile.drawing.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, even, legend, marker, path, svg, text, y_grid
from rooftile.drawing.units import percent, size
from rooftile_lab.report import planned_picture
from rooftile_lab.report.formats import Cost, Formats

# nats per byte that two trainings differ by
LITTLE = 0.01
# pixels between two names
LINE = 17.0


def section(found: Formats) -> dict[str, Any]:
    """Returns the section's words, charts and table."""
    curves, frontier = (
        f"Held-out loss in {found.pictured}, and what the engine says",
        "Loss above full precision, by the model's bytes",
    )
    return {
        "claim": claim(found),
        "setup": (
            f"A Llama with {found.parameters:,} parameters learns the bytes of Python's own documentation for {found.steps:,} steps. Then "
            "copies of it take the same further steps on the same batches: one in full precision, which is rounded to each format "
            "afterwards, and one for each format whose layers multiply with rounded weights while they learn. All losses are on text that was "
            "held out. A program calls rooftile.qat.prepare(model, \"int4\"), trains as before, and serves what rooftile.qat.save wrote."
        ),
        "charts": [Chart(curves, safe(_curves(found, curves))), Chart(frontier, safe(_frontier(found, frontier)), table=_table(found)), planned_picture.chart(found.planned)],
        "note": (
            f"The rings are the losses of rooftile.LLM, which read the checkpoints of both {found.pictured} models: "
            f"{found.served_rounded:.4f} rounded, {found.served_trained:.4f} trained. Embedding and head stay in full precision, which is much of so small a "
            f"model. Single trainings differ by about {LITTLE} nats per byte, so points may lie below zero; rooftile bench qat trains three seeds longer."
        ),
    }  # fmt: skip


def claim(found: Formats) -> str:
    """Returns the section's title, from the losses of the format that is drawn."""
    one = next(cost for cost in found.costs if cost.format == found.pictured)
    by_rounding, by_training = one.rounded - found.continued, one.trained - found.continued
    # single trainings differ by so much
    if by_rounding <= LITTLE:
        return f"Rounding to {one.format} costs this Llama nothing that shows"
    if by_rounding - by_training <= LITTLE:
        return f"Training for {one.format} wins nothing back that shows: rounding costs {by_rounding:+.4f} nats per byte"
    share = min((by_rounding - by_training) / by_rounding, 1.0)
    return f"Training for {one.format} wins back {percent(share)} of the {by_rounding:.4f} nats per byte that rounding costs"


def _curves(found: Formats, title: str) -> str:
    """Draws losses over steps, with a ring for each model that was served."""
    lines = [
        Series(name="full precision", kind="other", points=found.full), Series(name="trained", kind="ours", points=found.trained),
        Series(name="rounded", kind="standard", points=found.rounded),
    ]  # fmt: skip
    last = found.full[-1][0]
    served = {"standard": found.served_rounded, "ours": found.served_trained}
    rings = [(kind, (last, loss), f"served by rooftile.LLM: {loss:.4f}") for kind, loss in served.items()]
    return line_chart(
        lines, title=title, x_name="steps", y_name="nats per byte", write=lambda loss: f"{loss:.4f}", marks=True, rings=rings
    )


def _frontier(found: Formats, title: str) -> str:
    """Draws each format twice, rounded and trained, at its bytes."""
    above = {one.format: (one.rounded - found.continued, one.trained - found.continued) for one in found.costs}
    values = [0.0, *(value for pair in above.values() for value in pair)]
    low, high = _room(min(values), max(values))
    widths = [one.nbytes for one in found.costs]
    # names stand to the right of their points
    x = Axis(low=min(widths) / 1.08, high=max(widths) * 1.3, start=LEFT, stop=WIDTH - RIGHT, log=True)
    y = Axis(low=low, high=high, start=HEIGHT - BOTTOM, stop=TOP, log=False)
    parts = [y_grid(y, even(low, high), lambda loss: f"{loss:+.3f}" if loss else "0")]
    ticks = _spread([(x.place(n), size(n)) for n in sorted(widths)], 60.0)
    parts += [text(place, HEIGHT - BOTTOM + 16, words, "tick", "middle") for place, words in ticks]
    parts.append(text(WIDTH - RIGHT, HEIGHT - 6, f"bytes of the model ({size(found.nbytes)} in full precision)", "axis", "end"))
    for one in found.costs:
        ends = [(x.place(one.nbytes), y.place(value)) for value in above[one.format]]
        parts.append(f'<polyline class="line thin due dashed" points="{path(ends)}"/>')
        for kind, how, place, value in zip(("standard", "ours"), ("rounded", "trained"), ends, above[one.format], strict=True):
            parts.append(marker(kind, place, f"{one.format}, {how}: {value:+.4f} nats per byte, {size(one.nbytes)}"))
    parts += _names(found.costs, above, x, y)
    parts.append(legend([("trained for it", "ours"), ("rounded", "standard")]))
    return svg(title, "nats per byte above full precision over bytes, each format rounded and trained", parts)


def _names(costs: Sequence[Cost], above: dict[str, tuple[float, float]], x: Axis, y: Axis) -> list[str]:
    """Writes the formats' names beside their points, each a line below the one above it where they would overlap."""
    parts: list[str] = []
    middle = (x.start + x.stop) / 2
    for is_right in (False, True):
        side = [one for one in costs if (x.place(one.nbytes) > middle) == is_right]
        if not side:
            continue
        column = max(x.place(one.nbytes) for one in side) + 16
        at, lowest = -LINE, HEIGHT - BOTTOM - 4
        ordered = sorted(side, key=lambda one: y.place(above[one.format][0]))
        for n, one in enumerate(ordered):
            point = x.place(one.nbytes), y.place(above[one.format][0])
            # room for the names that follow
            at = min(max(at + LINE, point[1] + 4), lowest - LINE * (len(ordered) - 1 - n))
            parts.append(f'<path class="leader" d="M {point[0] + 5:.1f} {point[1]:.1f} L {column - 3:.1f} {at - 4:.1f}"/>')
            parts.append(text(column, at, one.format, "label", "start"))
    return parts


def _spread(ticks: Sequence[tuple[float, str]], apart: float) -> list[tuple[float, str]]:
    """Returns the ticks that stand far enough from the one before."""
    kept: list[tuple[float, str]] = []
    for place, words in ticks:
        if not kept or place - kept[-1][0] >= apart:
            kept.append((place, words))
    return kept


def _room(low: float, high: float) -> tuple[float, float]:
    margin = 0.08 * (high - low or 1.0)
    return low - margin, high + margin


def _table(found: Formats) -> Table:
    rows = [["full precision", size(found.nbytes), "", ""]]
    rows += [
        [one.format, size(one.nbytes), f"{one.rounded - found.continued:+.4f}", f"{one.trained - found.continued:+.4f}"]
        for one in found.costs
    ]  # fmt: skip
    return Table(["", "bytes", "rounded", "trained for it"], rows)
