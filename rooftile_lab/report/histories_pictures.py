"""Pictures of the study of users' histories: AUC, time and bytes over the events that a model reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rooftile.drawing import charts
from rooftile.drawing.charts import Series, names_at_ends, room_of_names
from rooftile.drawing.page import Chart, Table, safe
from rooftile.drawing.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, marker, path, svg, text, y_grid
from rooftile.drawing.units import duration, size, tokens
from rooftile_lab.bench.results import Row

NAMES = {"din": "DIN", "sim-soft": "SIM soft", "sim-hard": "SIM hard", "eta": "ETA", "twin": "TWIN", "hstu": "HSTU"}
# all are computed by this library, so none has the colour that stands for it; DIN reads every event, which is the plain way
KINDS = {"din": "standard", "sim-soft": "third", "sim-hard": "rose", "eta": "gold", "twin": "olive", "hstu": "mauve"}
X_NAME = "last events that a model reads"
Value = Callable[[Row], float]
Write = Callable[[float], str]


def pictures(rows: Sequence[Row]) -> list[Chart]:
    """Draws AUC, time and bytes of rows that have them; nothing if no method has enough lengths."""
    if not charts.enough(lines(rows, auc_of)):
        return []
    return [
        _auc(rows),
        _cost(rows, "Time per user, 64 candidates", "time per user", time_of, duration),
        _cost(rows, "Bytes read per user", "bytes, counted", bytes_of, size),
    ]


def auc_of(row: Row) -> float:
    """The AUC of clicks, all candidates counted."""
    return row.measures["all_auc"]


def time_of(row: Row) -> float:
    """The time of a user in µs."""
    return row.median_us or 0.0


def bytes_of(row: Row) -> float:
    """The bytes of a user."""
    return row.measures["user_bytes"]


def by_length(rows: Sequence[Row], method: str, value: Value) -> dict[int, float]:
    """A value of a method by the number of events that it reads, rising."""
    return dict(sorted((int(row.measures["length_events"]), value(row)) for row in rows if row.backend == method))


def possible(rows: Sequence[Row]) -> dict[int, float]:
    """The AUC of one who knows the interests in the events that are read, by their number."""
    return dict(sorted((int(row.measures["length_events"]), row.measures["possible_auc"]) for row in rows))


def lines(rows: Sequence[Row], value: Value) -> list[Series]:
    """A line for each method that has rows, over the number of events."""
    return [
        Series(name=NAMES[name], kind=KINDS[name], points=tuple((float(n), y) for n, y in points.items()))
        for name in NAMES
        if (points := by_length(rows, name, value))
    ]


def table(rows: Sequence[Row], value: Value, write: Write, more: dict[str, dict[int, float]] | None = None) -> Table:
    """A column for each method, a row for each length; `more` are further columns by their names."""
    columns = {NAMES[name]: by_length(rows, name, value) for name in NAMES} | (more or {})
    columns = {name: points for name, points in columns.items() if points}
    lengths = sorted({n for points in columns.values() for n in points})
    cells = [[f"{n:,}", *(write(points[n]) if n in points else "–" for points in columns.values())] for n in lengths]
    return Table(["events", *columns], cells)


def _cost(rows: Sequence[Row], title: str, y_name: str, value: Value, write: Write) -> Chart:
    picture = charts.log_chart(lines(rows, value), title=title, y_name=y_name, write=write, x_name=X_NAME, named=True)
    return Chart(title, safe(picture), table=table(rows, value, write))


def _auc(rows: Sequence[Row]) -> Chart:
    """AUC over the length, on a grey band for what is possible."""
    series, best = lines(rows, auc_of), possible(rows)
    least = min(y for values in (best.items(), *(line.points for line in series)) for _, y in values)
    low = min(int(10 * least) / 10, 0.9)
    stop = WIDTH - RIGHT - room_of_names(series)
    x = Axis(low=min(best) / 1.12, high=max(best) * 1.12, start=LEFT, stop=stop, log=True)
    # a little room below and above, so that no mark is cut
    y = Axis(low=low - 0.04 * (1 - low), high=1 + 0.06 * (1 - low), start=HEIGHT - BOTTOM, stop=TOP, log=False)
    parts = [y_grid(y, [n / 10 for n in range(round(10 * low), 11)], lambda share: f"{share:.1f}")]
    parts += [text(x.place(n), HEIGHT - BOTTOM + 16, tokens(n), "tick", "middle") for n in best]
    parts += [
        text(WIDTH - RIGHT, HEIGHT - 6, X_NAME, "axis", "end"),
        text(4, 14, "AUC; grey band: what is possible", "axis", "start"),
    ]
    # below the lines, which mostly hide it
    parts.append(f'<polyline class="line due broad" points="{path([(x.place(n), y.place(auc)) for n, auc in best.items()])}"/>')
    for line in series:
        points = [(x.place(n), y.place(value)) for n, value in line.points]
        parts.append(f'<polyline class="line {line.kind}" points="{path(points)}"/>')
        words = [f"{line.name}, {n:,.0f} events: {value:.3f}" for n, value in line.points]
        parts += [marker(line.kind, point, word) for point, word in zip(points, words, strict=True)]
    title = "AUC of clicks"
    picture = svg(title, f"AUC over {X_NAME}", [*parts, *names_at_ends(series, x, y)])
    return Chart(title, safe(picture), table=table(rows, auc_of, lambda auc: f"{auc:.3f}", {"possible": best}))
