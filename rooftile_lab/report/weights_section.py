"""The section of the page about what a model weighs in each format of weights."""

from __future__ import annotations

from typing import Any

from rooftile.drawing.charts import Series, bars, log_chart
from rooftile.drawing.page import Chart, Table, safe
from rooftile.drawing.units import size
from rooftile_lab.bench.weighing import Weighed
from rooftile_lab.report.weights import Weights

# nats per byte that are not noticed: runs of a training differ by as much
LITTLE = 0.01


def section(found: Weights) -> dict[str, Any]:
    """Returns the section's words, charts and table."""
    plain, *others = found.weighed
    rows = [(one.format, "other" if one is plain else "ours", float(one.nbytes), size(one.nbytes)) for one in found.weighed]
    lost = [(one.format, "ours", max(one.nats - plain.nats, 0.0), f"{one.nats - plain.nats:+.4f}") for one in others]
    title, above = "Bytes of the projections", f"Nats per byte above {plain.format}"
    charts = [Chart(title, safe(bars(rows, title=title))), Chart(above, safe(bars(lost, title=above)))]
    return {
        "claim": claim(found),
        "setup": (
            "The Llama that was trained above is read again with the weights of its projections in few bits: embedding, head and norms "
            "stay as they are. In fp8 and int8 the activations are quantised too, for each token; in the others they keep their 16 or 32 bits. "
            "A program only writes rooftile.LLM(model, weights=\"int4\"), and rooftile quantise writes such a checkpoint."
        ),
        "charts": [*charts, _rooflines(found)],
        "table": _speeds(found),
        "note": (
            "A ring is a product that was timed here, in int8 for 8 bits and in int4 for 4: above its line if the weight came from a cache, and far "
            "below it where no kernel multiplies the format. "
            f"The text is one that the model has learnt, so only the distance to {plain.format} says something; below zero is chance. Groups of so small "
            "a model are small, so their scales weigh more than a large model's. rooftile bench quality trains three models and tests them on "
            "held-out text."
        ),
    }  # fmt: skip


def claim(found: Weights) -> str:
    """Returns the section's title: the smallest format that loses next to nothing."""
    plain, best = found.weighed[0], smallest(found)
    if best is None:
        return f"Every format of few bits costs this Llama more than {LITTLE} nats per byte"
    return f"In {best.format} the Llama's projections are {plain.nbytes / best.nbytes:.1f}× smaller, at {best.nats - plain.nats:+.4f} nats per byte"


def smallest(found: Weights) -> Weighed | None:
    """Returns the smallest format that loses next to nothing; None if every format loses more."""
    plain, *others = found.weighed
    return min((one for one in others if one.nats - plain.nats <= LITTLE), key=lambda one: one.nbytes, default=None)


def _rooflines(found: Weights) -> Chart:
    N, K = found.size
    kinds = ("other", "ours", "third")
    series = [
        Series(name=line.name, kind=kind, points=tuple((float(M), rate) for M, rate in line.points))
        for line, kind in zip(found.rooflines, kinds, strict=True)
    ]
    title = f"Where bytes bind, and where arithmetic: a product with {N} × {K} weights, by their format"
    of_line = {line.name: kind for line, kind in zip(found.rooflines, kinds, strict=True)}
    rings = [
        (of_line[one.name], (float(one.rows), one.flops_per_s), f"{one.format}, {one.rows} rows: {one.flops_per_s / 1e9:,.3g} G reached")
        for one in found.reached
    ]  # fmt: skip
    drawn = log_chart(
        series, title=title, y_name="FLOP/s", x_name="rows", write=lambda rate: f"{rate / 1e9:,.3g} G", ticks=(1, 8, 64, 512, 4096),
        rings=rings,
    )  # fmt: skip
    return Chart(title, safe(drawn))


def _speeds(found: Weights) -> Table | None:
    if not found.tokens_s:
        return None
    return Table(["weights", "tokens per second, one request"], [[word, f"{rate:,.0f}"] for word, rate in found.tokens_s.items()])
