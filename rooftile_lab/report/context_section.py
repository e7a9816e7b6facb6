"""The section of the page about context: what attention, a hybrid and a recurrence keep and take as a text grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rooftile.drawing import charts
from rooftile.drawing.charts import Series
from rooftile.drawing.page import Chart, Table, safe
from rooftile.drawing.units import duration, size, tokens
from rooftile_lab.bench.results import Row
from rooftile_lab.report.studies import Study, machine_of

# all three are served by this library, so none has the colour that stands for it
KINDS = {"attention": "gold", "hybrid": "third", "mamba2": "rose"}
NAMES = {"attention": "attention", "hybrid": "hybrid", "mamba2": "Mamba-2"}
# the phase of a row, the measure, the words of the title, the axis, and how a number is written
QUANTITIES: tuple[tuple[str, str, str, str, Callable[[float], str]], ...] = (
    ("write", "sequence_bytes", "Memory of a sequence", "bytes in the caches, one sequence", size),
    ("write", "write_us", "Time of writing a token", "time per token written", duration),
    ("read", "read_us", "Time of reading a token", "time per token of a prompt", duration),
)
# times that differ by less are called equal
SURE = 1.05


def section(study: Study) -> dict[str, Any]:
    """Returns the section's words and charts."""
    committed = [("On a GPU", study.committed)] if any(row.measures for row in study.committed) else []
    here = ("The same on this machine" if committed else "On this machine", study.here)
    return {
        "claim": claim(study.committed if committed else study.here),
        "setup": (
            "Attention keeps the keys and values of every token, and reads them all for each token that it writes. A recurrence keeps a "
            "state of one size. Three small models with equally many parameters are served by rooftile.LLM, one after another: with "
            "attention in all layers, with Mamba-2 in all layers, and a hybrid, with Mamba-2 in all layers but two, which attend."
        ),
        "parts": [_part(title, rows) for title, rows in [*committed, here]],
        "note": (
            "Weights are random, which changes no time. Prompts are read one by one, so launches are most of the time of a short one. Keys and values are in the model's 16 bits on a GPU, states in fp32. rooftile bench context repeats the "
            "study."
        ),
    }  # fmt: skip


def claim(rows: Sequence[Row]) -> str:
    """Returns the section's title: the memory of a sequence at the longest context of all three models."""
    found = by_context(rows, "write", "sequence_bytes")
    longest = max(set.intersection(*(set(found.get(name, {})) for name in NAMES)), default=None)
    if longest is None:
        return "Memory and time against context"
    each = [size(found[name][longest]) for name in NAMES]
    return f"At {longest:,} tokens a sequence takes {each[0]} with attention, {each[1]} in a hybrid, {each[2]} with Mamba-2"


def by_context(rows: Sequence[Row], phase: str, measure: str) -> dict[str, dict[int, float]]:
    """A measure of rows by model and by tokens of context."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.phase == phase and measure in row.measures:
            found.setdefault(row.backend, {})[int(row.measures["context_tokens"])] = row.measures[measure]
    return {name: dict(sorted(found[name].items())) for name in NAMES if name in found}


def _part(title: str, rows: Sequence[Row]) -> dict[str, Any]:
    timed = [row for row in rows if row.measures]
    return {
        "title": title,
        "note": f"{machine_of(timed)}: {timed[0].problem}." if timed else "",
        "failed": [f"{NAMES.get(row.backend, row.backend)}: {row.reason}" for row in rows if row.reason],
        "charts": [chart for quantity in QUANTITIES if (chart := context_chart(rows, *quantity)) is not None],
    }


def context_chart(
    rows: Sequence[Row], phase: str, measure: str, title: str, y_name: str, write: Callable[[float], str]
) -> Chart | None:
    """Draws a quantity over the context; None if no model has enough lengths."""
    found = by_context(rows, phase, measure)
    series = [
        Series(name=NAMES[name], kind=KINDS[name], points=tuple((float(n), value) for n, value in points.items()))
        for name, points in found.items()
    ]
    if not charts.enough(series):
        return None
    lengths = sorted({n for points in found.values() for n in points})
    cells = [[f"{n:,}", *(write(points[n]) if n in points else "–" for points in found.values())] for n in lengths]
    picture = charts.log_chart(series, title=title, y_name=y_name, write=write, x_name="tokens of context", named=True)
    table = Table(["tokens", *(NAMES[name] for name in found)], cells)
    return Chart(f"{title}: {_ends(found, write)}", safe(picture), _crossing(found), table)


def _ends(found: dict[str, dict[int, float]], write: Callable[[float], str]) -> str:
    """Names the numbers at the longest context of all models."""
    last = max(set.intersection(*(set(points) for points in found.values())), default=0)
    return (
        f"at {tokens(last)} tokens {', '.join(f'{NAMES[name]} {write(points[last])}' for name, points in found.items() if last)}"
    )


def _crossing(found: dict[str, dict[int, float]]) -> str:
    """Says from which of the lengths on the other models are below attention."""
    due = found.get("attention", {})
    words = []
    for name, points in found.items():
        if name == "attention":
            continue
        common = sorted(set(points) & set(due))
        last = max((n for n in common if points[n] * SURE > due[n]), default=0)
        below = [n for n in common if n > last]
        where = (
            "at all of these lengths"
            if below == common
            else f"from {below[0]:,} tokens on"
            if below
            else "at none of these lengths"
        )
        # the name is not broken between its letters and its number
        written = NAMES[name].replace("-", "\N{NON-BREAKING HYPHEN}")
        words.append(f"{'the ' * (name == 'hybrid')}{written} {where}")
    return f"Below attention: {', '.join(words)}." if due and words else ""
