"""Pictures of recall: one method beside exact attention, and what keeps a state beside what attends."""

from __future__ import annotations

from rooftile.drawing import charts
from rooftile.drawing.charts import Series, names_at_ends, room_of_names
from rooftile.drawing.page import Chart, safe
from rooftile.drawing.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, marker, path, svg, text, y_grid
from rooftile.drawing.units import percent
from rooftile_lab.bench.learning.methods import EXACT, HYBRID
from rooftile_lab.report.recall import Curve, Curves

# a small picture, of which two stand beside each other on a phone
SMALL = {"width": 260, "height": 180}
SMALL_LEFT, SMALL_RIGHT, SMALL_TOP, SMALL_BOTTOM = 42, 10, 10, 34
# methods with a state of fixed size, and methods that attend in some layers or in all; each with its colour
STATES = {EXACT: "other", HYBRID: "third", "delta": "gold", "mamba2": "rose"}
SHORT = {EXACT: "attention", HYBRID: "hybrid", "delta": "delta net", "mamba2": "Mamba-2"}


def picture(curve: Curve, exact: Curve | None, chance: float, title: str, names: dict[str, str]) -> str:
    """Draws recall over the number of pairs: the method, exact attention, and chance."""
    pairs = sorted(curve.by_pairs)
    x = Axis(
        low=min(pairs) / 1.2,
        high=max(pairs[-1], 2 * pairs[0]) * 1.2,
        start=SMALL_LEFT,
        stop=SMALL["width"] - SMALL_RIGHT,
        log=True,
    )
    y = Axis(low=0, high=1, start=SMALL["height"] - SMALL_BOTTOM, stop=SMALL_TOP, log=False)
    parts = []
    for share in (0.0, 0.5, 1.0):
        parts.append(f'<path class="grid" d="M {x.start} {y.place(share):.1f} H {x.stop}"/>')
        parts.append(text(x.start - 6, y.place(share) + 4, percent(share), "tick", "end"))
    parts += [text(x.place(n), y.start + 15, f"{n}", "tick", "middle") for n in pairs]
    parts.append(text(x.stop, SMALL["height"] - 4, "pairs", "axis", "end"))
    parts.append(_chance(chance, x, y))
    for kind, one in (("other", exact), ("ours", curve)):
        if one is not None:
            points = [(x.place(n), y.place(one.by_pairs[n])) for n in sorted(one.by_pairs)]
            words = [f"{names.get(one.method, one.method)}, {n} pairs: {percent(one.by_pairs[n])}" for n in sorted(one.by_pairs)]
            parts.append(f'<polyline class="line {kind}" points="{path(points)}"/>')
            parts += [marker(kind, point, word) for point, word in zip(points, words, strict=True)]
    return svg(title, "recall over the number of pairs, beside exact attention and chance", parts, **SMALL)


def states(curves: Curves) -> list[Chart]:
    """Draws what attends beside what keeps a state: recall by pairs and by distance, and the loss on English."""
    found = {one.method: one for one in curves.curves if one.method in STATES}
    if len(found) < 2 or EXACT not in found:
        return []
    drawn = []
    for what, x_name, title in (
        ("by_pairs", "pairs in a text of one length", "Recall by the number of pairs"),
        ("by_distance", "tokens from a question back to its pair, at most", "Recall by distance"),
    ):
        series = [
            Series(
                name=SHORT[name],
                kind=STATES[name],
                points=tuple(sorted((float(n), y) for n, y in getattr(found[name], what).items())),
            )
            for name in STATES
            if name in found
        ]
        if charts.enough(series):
            drawn.append(Chart(title, safe(recall_chart(series, curves.chance, title, x_name)), _sentence(found, what)))
    losses = [(SHORT[name], STATES[name], loss) for name in STATES if name in found and (loss := found[name].loss) is not None]
    if len(losses) > 1:
        title = "Loss on held-out English"
        bytes_alone = (
            "" if curves.frequencies_loss is None else f" A guess by the frequencies of bytes has {curves.frequencies_loss:.2f}."
        )
        shown = charts.points(losses, title=title, x_name="nats per byte: less is better", write=lambda nats: f"{nats:.3f}")
        drawn.append(Chart(title, safe(shown), f"A short training, at one learning rate.{bytes_alone}"))
    return drawn


def recall_chart(series: list[Series], chance: float, title: str, x_name: str) -> str:
    """Draws shares of right answers over a count, with the line of chance."""
    xs = sorted({x for line in series for x, _ in line.points})
    x = Axis(
        low=xs[0] / 1.12, high=max(xs[-1], 2 * xs[0]) * 1.12, start=LEFT, stop=WIDTH - RIGHT - room_of_names(series), log=True
    )
    y = Axis(low=0, high=1.08, start=HEIGHT - BOTTOM, stop=TOP, log=False)
    parts = [y_grid(y, (0.0, 0.25, 0.5, 0.75, 1.0), percent)]
    parts += [text(x.place(n), HEIGHT - BOTTOM + 16, f"{n:,.0f}", "tick", "middle") for n in xs]
    parts += [text(x.stop, HEIGHT - 6, x_name, "axis", "end"), text(4, 14, "questions answered rightly", "axis", "start")]
    parts.append(_chance(chance, x, y))
    for line in series:
        points = [(x.place(n), y.place(share)) for n, share in line.points]
        parts.append(f'<polyline class="line {line.kind}" points="{path(points)}"/>')
        parts += [
            marker(line.kind, point, f"{line.name}, {n:,.0f}: {percent(share)}")
            for point, (n, share) in zip(points, line.points, strict=True)
        ]
    return svg(title, f"recall over {x_name}", [*parts, *names_at_ends(series, x, y)])


def _chance(chance: float, x: Axis, y: Axis) -> str:
    ends = [(float(x.start), y.place(chance)), (float(x.stop), y.place(chance))]
    line = f'<polyline class="line due dashed" points="{path(ends)}"><title>chance: {percent(chance)}</title></polyline>'
    return line + text(x.start + 4, y.place(chance) + 13, "chance", "tick", "start")


def _sentence(found: dict[str, Curve], what: str) -> str:
    """Says what each recalls at the far end of a chart."""
    ends = {name: getattr(found[name], what) for name in STATES if name in found}
    last = max(ends[EXACT])
    shares = ", ".join(f"{SHORT[name]} {percent(points[last])}" for name, points in ends.items() if last in points)
    return f"{f'Of {last:,} pairs' if what == 'by_pairs' else f'Up to {last:,} tokens back'}: {shares}."
