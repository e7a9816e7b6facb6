"""The section of the page about experts: their loss beside a dense feed-forward's, and how they share the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rooftile.drawing import charts
from rooftile.drawing.heat_map import heat_map
from rooftile.drawing.page import Chart, Table, safe
from rooftile.drawing.units import number, times
from rooftile_lab.bench.learning.expert_training import BALANCED, DENSE, KINDS, UNBALANCED
from rooftile_lab.bench.results import Row
from rooftile_lab.report.studies import Study, machine_of

NAMES = {DENSE: "dense", BALANCED: "experts, balance loss", UNBALANCED: "experts without it"}
MARKS = {DENSE: "gold", BALANCED: "third", UNBALANCED: "rose"}
# losses of two trainings of one model differ by so much
LITTLE = 0.01
# loads over the mean that the heat map's scale shows
SCALE = (0.0, 1.0, 2.0, 4.0)


def section(study: Study) -> dict[str, Any]:
    """Returns the section's words and charts."""
    committed = [("On a GPU", study.committed)] if any(row.measures for row in study.committed) else []
    here = ("The same, small, on this machine" if committed else "Small, on this machine", study.here)
    return {
        "claim": claim(study.committed if committed else study.here),
        "setup": (
            "A layer of experts has many small feed-forwards, of which a router gives each token a few. Three small decoders learn the bytes of "
            "Python's documentation: one with a dense feed-forward, and two with experts of the same active width, so that a token costs "
            "equally many products. One of the two adds the balance loss, a price on the scores of experts that are chosen often."
        ),
        "parts": [part(title, rows) for title, rows in [*committed, here]],
        "note": (
            "No expert has a capacity and no token is dropped, so an uneven load costs time and unused weights, not tokens. There is one training of "
            f"each: losses that differ by less than {LITTLE} nats are called equal. rooftile bench expert-training repeats the study."
        ),
    }  # fmt: skip


def claim(rows: Sequence[Row]) -> str:
    """Returns the section's title: the loss of experts beside the dense one, and the busiest expert with and without balance."""
    found = by_kind(rows)
    if not {DENSE, BALANCED, UNBALANCED} <= found.keys():
        return "Experts: their loss, and how they share the tokens"
    lower = found[DENSE].measures["loss_nats"] - found[BALANCED].measures["loss_nats"]
    loss = "equal the loss of" if abs(lower) < LITTLE else f"are {abs(lower):.2f} nats {'below' if lower > 0 else 'above'}"
    busiest = [times(found[kind].measures["busiest_load_ratio"]) for kind in (BALANCED, UNBALANCED)]
    return (
        f"Experts {loss} a dense layer of equal active width; the busiest gets {busiest[0]} the mean load, and {busiest[1]} without the "
        "balance loss"
    )


def by_kind(rows: Sequence[Row]) -> dict[str, Row]:
    """The rows that have a loss, by their kind."""
    found = {row.backend: row for row in rows if row.measures}
    return {kind: found[kind] for kind in KINDS if kind in found}


def part(title: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the charts and words of one run."""
    found = by_kind(rows)
    words = machine_of(found.values()) if found else ""
    some = next(iter(found.values())).settings if found else {}
    sizes = f"{some.get('experts')} experts of width {some.get('width')}, {some.get('active')} per token and {some.get('shared')} shared"
    problem = f"{next(iter(found.values())).problem}; {sizes}" if found else ""
    return {
        "title": title,
        "note": f"{words}: {problem}." if found else "",
        "failed": [f"{NAMES.get(row.backend, row.backend)}: {row.reason}" for row in rows if row.reason],
        "charts": [*([losses(found)] if found else []), *(loads(row) for row in found.values() if row.settings.get("loads"))],
    }


def losses(found: dict[str, Row]) -> Chart:
    """Draws the losses of all kinds on one scale."""
    values = {kind: row.measures["loss_nats"] for kind, row in found.items()}
    apart = max(values.values()) - min(values.values())
    least = f"{NAMES[min(values, key=values.__getitem__)]} has the least"
    title = f"Loss on held-out English: {f'all within {LITTLE} nats' if apart < LITTLE else least}"
    rows = [(NAMES[kind], MARKS[kind], value) for kind, value in values.items()]
    picture = charts.points(rows, title=title, x_name="nats per byte: less is better", write=lambda nats: f"{nats:.3f}")
    cells = [
        [NAMES[kind], f"{values[kind]:.4f}", f"{row.settings['parameters']:,}", *_load_cells(row)] for kind, row in found.items()
    ]
    head = ["", "nats per byte", "parameters", "busiest over mean", "idle experts"]
    note = "All three multiply equally many numbers per token; experts have more parameters."
    return Chart(title, safe(picture), note, Table(head, cells))


def _load_cells(row: Row) -> list[str]:
    if "busiest_load_ratio" not in row.measures:
        return ["–", "–"]
    return [times(row.measures["busiest_load_ratio"]), f"{row.measures['idle_experts']:.0f}"]


def loads(row: Row) -> Chart:
    """Draws the load of each expert by layer."""
    found = [sorted(layer, reverse=True) for layer in row.settings["loads"]]
    how = "With" if row.backend == BALANCED else "Without"
    title = f"{how} the balance loss the busiest expert has {times(max(max(layer) for layer in found))} the mean load"
    idle, all_of_them = row.measures["idle_experts"], sum(map(len, found))
    picture = heat_map(
        found, title=title, row_name="layer", column_name="expert", scale=SCALE, write=lambda load: f"{number(load)}×"
    )
    note = (
        "A square is an expert, its colour the tokens that it gets over the mean; each layer is sorted. "
        f"{idle:.0f} of {all_of_them} experts get less than a tenth of the mean."
    )
    return Chart(title, safe(picture), note)
