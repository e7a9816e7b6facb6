"""A plan as one HTML file, which loads nothing: the layers, the roofline, the other operators, and the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rooftile.diagnosis.output.units import duration
from rooftile.drawing import notebook as shown
from rooftile.drawing import page
from rooftile.drawing.charts import Series, log_chart
from rooftile.drawing.page import Chart, Table, json_element, safe
from rooftile.drawing.units import count
from rooftile.planning.output.table import HEAD, OTHER_HEAD, groups_of, layer_cells, options_words, other_cells, sentences
from rooftile.planning.records import Whole


def render(plan: Whole, values: Mapping[str, Any]) -> str:
    """Renders the page of a plan.

    values: the whole of it, as in its JSON.

    Raises InvalidInput if jinja2 is not installed.
    """
    return page.render(
        "rooftile.planning.output", "page.html",
        title=f"Plan for {plan.model}", device=plan.device, sentences=list(sentences(plan)), head=HEAD,
        layers=[{"cells": layer_cells(alike), "words": options_words(alike)} for alike in groups_of(plan.layers)],
        other_head=OTHER_HEAD, others=[other_cells(other) for other in plan.others],
        roofline=_roofline(plan), numbers=json_element(values),
    )  # fmt: skip


def notebook(plan: Whole) -> str:
    """Returns what a notebook shows of a plan: its sentences, the layers with their formats, and the roofline."""
    groups = groups_of(plan.layers)
    layers = shown.table(HEAD, map(layer_cells, groups), words=(0, 1, 7, 8, 9))
    rows = (
        (layer_cells(alike)[0], option.format, duration(option.predicted_us), _or_dash(option.measured_us), f"{option.loss:.2g}")
        for alike in groups
        for option in alike[0].options
    )
    formats = shown.table(("module", "format", "predicted", "measured", "loss"), rows, words=(0, 1))
    return shown.card(
        shown.sentence(f"plan for {plan.model} on {plan.device}"), *map(shown.sentence, sentences(plan)), layers, formats,
        page.in_notebook(_roofline(plan)),
    )  # fmt: skip


def _or_dash(us: float | None) -> str:
    return "-" if us is None else duration(us)


def _roofline(plan: Whole) -> Chart | None:
    """The rate of each layer over its intensity, as it is, below the roof of its dtype; None where no layer was counted."""
    timed = [layer for layer in plan.layers if layer.options[0].us and layer.flops]
    spots = [(layer.intensity, layer.flops / layer.options[0].us * 1e6, layer) for layer in timed]
    spots.sort(key=lambda spot: spot[0])
    if not spots:
        return None
    bandwidth = plan.ceilings["copy_gbs"] * 1e9
    ridge = max(layer.ridge for *_, layer in spots)
    ends = sorted({spots[0][0] / 2, ridge, max(spots[-1][0], ridge) * 2})
    title = "The layers under the roof, as they are"
    picture = log_chart(
        [
            Series(name="roof", kind="due", points=tuple((x, min(x, ridge) * bandwidth) for x in ends)),
            Series(name="layers", kind="ours", points=_distinct(tuple((x, y) for x, y, _ in spots))),
        ],
        title=title, y_name="FLOP/s", write=lambda rate: count(rate, ""), x_name="FLOPs per byte", ticks=ends,
    )  # fmt: skip
    table = Table(
        ["layer", "FLOPs per byte", "FLOP/s", "time", "chosen"],
        [[layer.name, f"{x:.3g}", count(y, ""), duration(layer.options[0].us), layer.chosen] for x, y, layer in spots],
    )
    return Chart(title, safe(picture), "A layer left of the bend waits for memory, right of it for arithmetic.", table)


def _distinct(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    """Points of rising places: of layers with the same counts the fastest."""
    best: dict[float, float] = {}
    for x, y in points:
        best[x] = max(y, best.get(x, 0.0))
    return tuple(best.items())
