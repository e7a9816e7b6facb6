"""Draws what a longer history of a user brings and costs, from the committed lines of `rooftile bench user-histories`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from study_figures import beside_each_other, source

from rooftile.drawing import charts
from rooftile.drawing.charts import Series, names_at_ends, room_of_names
from rooftile.drawing.page import Chart, safe
from rooftile.drawing.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, marker, path, svg, text, y_grid
from rooftile.drawing.units import duration, size, tokens
from rooftile_lab.bench.results import Row
from rooftile_lab.report import studies

KINDS = {"din": "ours", "sim-soft": "third", "sim-hard": "rose", "eta": "gold", "twin": "standard", "hstu": "other"}
NAMES = {"din": "DIN", "sim-soft": "SIM soft", "sim-hard": "SIM hard", "eta": "ETA", "twin": "TWIN", "hstu": "HSTU"}
X_NAME = "last events that a model reads"


def lengths(results: Path) -> str:
    """Draws AUC, time and bytes over the length of the history."""
    rows = studies.committed(results / "cpu-user-histories.jsonl", "user-histories")
    possible = tuple(sorted({(row.measures["length_events"], row.measures["possible_auc"]) for row in rows}))
    drawn = [
        Chart("AUC of clicks", safe(auc_chart(lines(rows, lambda row: row.measures["all_auc"]), possible)), ""),
        cost_chart("Time of a user, 64 candidates", "time on one core", lines(rows, lambda row: row.median_us or 0.0), duration),
        cost_chart("Bytes read; HSTU as DIN", "bytes counted", lines(rows, lambda row: row.measures["user_bytes"]), size),
    ]
    return beside_each_other(drawn, "AUC, time and bytes against the length of a user's history, by method", source(rows))


def lines(rows: Sequence[Row], value: Callable[[Row], float]) -> list[Series]:
    """A line for each method, over the length."""
    return [
        Series(
            name=NAMES[name], kind=KINDS[name],
            points=tuple(sorted((row.measures["length_events"], value(row)) for row in rows if row.backend == name)),
        )
        for name in NAMES
    ]  # fmt: skip


def cost_chart(title: str, y_name: str, series: list[Series], write: Callable[[float], str]) -> Chart:
    """Draws a cost, both axes logarithmic."""
    return Chart(title, safe(charts.log_chart(series, title=title, y_name=y_name, write=write, x_name=X_NAME, named=True)), "")


def auc_chart(series: list[Series], possible: tuple[tuple[float, float], ...]) -> str:
    """Draws AUC over the length, and what is possible for one who knows these events."""
    xs = [x for x, _ in possible]
    stop = WIDTH - RIGHT - room_of_names(series)
    x = Axis(low=xs[0] / 1.12, high=xs[-1] * 1.12, start=LEFT, stop=stop, log=True)
    y = Axis(low=0.68, high=1.02, start=HEIGHT - BOTTOM, stop=TOP, log=False)
    parts = [y_grid(y, (0.7, 0.8, 0.9, 1.0), lambda share: f"{share:.1f}")]
    parts += [text(x.place(n), HEIGHT - BOTTOM + 16, tokens(n), "tick", "middle") for n in xs]
    parts += [text(x.stop, HEIGHT - 6, X_NAME, "axis", "end"), text(4, 14, "AUC; dashed: what is possible", "axis", "start")]
    for line in series:
        points = [(x.place(n), y.place(value)) for n, value in line.points]
        parts.append(f'<polyline class="line {line.kind}" points="{path(points)}"/>')
        words = [f"{line.name}, {n:,.0f} events: {value:.3f}" for n, value in line.points]
        parts += [marker(line.kind, point, word) for point, word in zip(points, words, strict=True)]
    parts.append(f'<polyline class="line due dashed" points="{path([(x.place(n), y.place(best)) for n, best in possible])}"/>')
    return svg("AUC of clicks", f"AUC over {X_NAME}", [*parts, *names_at_ends(series, x, y)])
