"""The section of the page about what bounds programs: Horace He's curve, and the diagnoses of the report's own steps."""

from __future__ import annotations

from typing import Any

from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.diagnosis.output.pictures.bars import time_line
from rooftile.diagnosis.output.pictures.roofline import roofline
from rooftile.diagnosis.output.table import PHASES
from rooftile.drawing import charts
from rooftile.drawing.charts import Series
from rooftile.drawing.page import Chart, Table, safe
from rooftile.drawing.units import count, duration, percent, size, times
from rooftile_lab.report.diagnosis import Diagnosed, Repeats, attention_bytes

# times of one pass differ by as much between two runs
SAME = 0.15


def section(found: Diagnosed, ceilings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the section's words and charts. ceilings: the page's, in place of each diagnosis's."""
    steps = [
        (f"Training with {name} attention", step)
        for name, step in (("eager", found.eager), ("Rooftile's", found.rooftile))
        if step
    ]
    if found.decode:
        steps.append((f"Decoding {found.batch} answers at once", found.decode))
    eager, ours = found.eager, found.rooftile
    shown = [repeats_chart(found.repeats)] if found.repeats and len(found.repeats.points) >= charts.FEWEST else []
    if eager and ours:
        shown.append(bytes_bars(eager, ours))
    shown += [chart for name, step in steps if step is not found.decode and (chart := _line_of(name, step))]
    if eager and (roofs := _roofline(eager, ceilings or eager.ceilings)):
        shown.append(roofs)
    return {
        "claim": claim(found),
        "setup": (
            "A program waits for memory, for arithmetic, or for neither: then it is overhead. To find out which, do more arithmetic on the "
            "same data: if the time stays, memory bounds it. rooftile diagnose does that for any PyTorch program, operator by operator; "
            "here are the steps that this report runs itself."
        ),
        "failed": [f"{name}: {reason}" for name, reason in found.why_not.items()],
        "charts": shown,
        "decode": found.decode and _line_of(*steps[-1]),
        "table": comparison(eager, ours) if eager and ours else None,
        "sentences": [(name, step.sentence) for name, step in steps],
        "note": (
            "Bytes and FLOPs are counted from one watched step, each tensor of an operator once; times come from unwatched steps, and "
            "roofs are measured. Behind PyTorch's name _scaled_dot_product_flash_attention_for_cpu Rooftile's tiles run in the second training step."
        ),
    }  # fmt: skip


def claim(found: Diagnosed) -> str:
    """Returns the section's title, from its numbers."""
    if found.eager and found.rooftile:
        before, after = found.eager.step.bytes, found.rooftile.step.bytes
        if before and after and before > after:
            return f"{size(before - after)} of traffic go away: the training step moves {percent(1 - after / before)} fewer bytes"
    return "What bounds a program: raise its arithmetic, and watch the time"


def repeats_chart(found: Repeats) -> Chart:
    """Draws time over repeats, with the ceilings' prediction, whose corner is the knee."""
    points = found.points
    flat, steep = points[0][1], points[-1][1] / points[-1][0]
    # the corner, so that the line does not cut it
    corner = [(found.knee, flat)] if points[0][0] < found.knee < points[-1][0] else []
    expected = sorted([(float(r), us) for r, us, _ in points] + corner)
    measured = tuple((float(r), us) for r, _, us in points)
    rung = max((r for r, *_ in points if r <= found.knee / 2), default=points[0][0])
    ratio = dict(measured)[rung] / measured[0][1]
    title = f"{rung} operations in place of one take {'the same time' if ratio < 1 + SAME else f'{times(ratio)} the time'}"
    series = [
        Series(name="measured", kind="ours", points=measured),
        Series(name="by the ceilings", kind="due", points=tuple(expected)),
    ]
    picture = charts.log_chart(
        series, title=title, y_name="time", write=duration, x_name="repeats", ticks=[float(r) for r, *_ in points]
    )  # fmt: skip
    rose = "does not rise" if found.measured_knee is None else f"rises from about {found.measured_knee:.0f}"
    note = (
        f"A multiply-add, repeated in one pass that moves {size(found.bytes)}. The ceilings put the knee at {found.knee:.0f} repeats, "
        f"after which each takes {duration(steep)}; the measured time {rose}."
    )
    table = Table(["repeats", "by the ceilings", "measured"], [[f"{r}", duration(due), duration(us)] for r, due, us in points])
    return Chart(title, safe(picture), note, table)


def bytes_bars(eager: Diagnosis, ours: Diagnosis) -> Chart:
    """Draws the bytes of both training steps, and of their attention."""
    rows = []
    for name, kind, step in (("eager attention", "standard", eager), ("Rooftile", "ours", ours)):
        for what, value in (("the step", step.step.bytes or 0), ("its attention", attention_bytes(step))):
            rows.append((f"{what}, {name}", kind, float(value), size(value)))
    rows.sort(key=lambda row: row[0].startswith("its"))
    before, after = attention_bytes(eager), attention_bytes(ours)
    title = f"Attention moves {times(before / after)} fewer bytes" if 0 < after < before else "The bytes of a training step"
    note = "Forward, backward and optimiser. Eager attention writes its scores and reads them back; tiles keep them in the cache."
    return Chart(title, safe(charts.bars(rows, title=title)), note)


def comparison(eager: Diagnosis, ours: Diagnosis) -> Table:
    """Compares the two training steps, quantity by quantity."""
    quantities = (
        ("time", lambda d: duration(d.step.time_us)),
        ("bytes", lambda d: size(d.step.bytes or 0)),
        ("FLOPs", lambda d: count(d.step.flops or 0)),
        ("operators", lambda d: f"{d.step.launches or 0:,}"),
        ("bound by", lambda d: d.step.bound or "–"),
        *((f"{bound}, of its time", lambda d, bound=bound: percent(d.step.shares.get(bound, 0.0))) for bound in ("memory", "compute", "overhead")),
    )  # fmt: skip
    return Table(["", "eager", "Rooftile"], [[name, write(eager), write(ours)] for name, write in quantities])


def _line_of(name: str, found: Diagnosis) -> Chart | None:
    chart = time_line(found.step, found.ops)
    return chart and chart._replace(title=f"{name}: {chart.title}")


def _roofline(found: Diagnosis, ceilings: dict[str, Any]) -> Chart | None:
    names = [f"{PHASES.get(op.phase, '')}{op.op.split('::')[-1]}" for op in found.ops]
    chart = roofline(ceilings, found.step, found.ops, (), names, any(op.kernels for op in found.ops), raised=False)
    return chart and chart._replace(title="The training step with eager attention, under this machine's roofs")
