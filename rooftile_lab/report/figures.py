"""The page's figures. Each is a picture with a title, a caption, and its numbers as a table."""

from __future__ import annotations

from collections.abc import Callable

from rooftile.drawing import charts
from rooftile.drawing.charts import Series
from rooftile.drawing.page import Chart, Table, safe
from rooftile.drawing.units import duration, number, percent, power, size, times
from rooftile_lab.bench.accuracy import PLAINEST
from rooftile_lab.report import block_map, claims
from rooftile_lab.report.block_tables import Samples
from rooftile_lab.report.claims import NAMES
from rooftile_lab.report.comparison import OURS, SDPA, STANDARD, Comparison, Reading
from rooftile_lab.report.experiments import Report
from rooftile_lab.report.precision import PrecisionErrors
from rooftile_lab.report.serving import Served, Serving
from rooftile_lab.report.tiles import Tiling
from rooftile_lab.report.training import Training

KINDS = {OURS: "ours", SDPA: "other", STANDARD: "standard"}


def length_chart(comparison: Comparison, what: str, title: str, y_name: str, write: Callable[[float], str]) -> Chart | None:
    """Draws a quantity over the length; None if no side has enough lengths."""
    series = [Series(name=NAMES[side], kind=KINDS[side], points=_points(comparison.of(side), what)) for side in comparison.sides]
    if not charts.enough(series):
        return None
    lengths = sorted({reading.N for reading in comparison.readings})
    rows = []
    for length in lengths:
        readings = [comparison.of(side).get(length) for side in comparison.sides]
        rows.append([f"{length:,}", *(write(getattr(reading, what)) if reading else "–" for reading in readings)])
    table = Table(["tokens", *(NAMES[side] for side in comparison.sides)], rows)
    picture = charts.log_chart(series, title=title, y_name=y_name, write=write)
    return Chart(title, safe(picture), table=table)


def _points(readings: dict[int, Reading], what: str) -> tuple[tuple[float, float], ...]:
    return tuple((float(N), float(getattr(reading, what))) for N, reading in sorted(readings.items()))


def traffic_chart(comparison: Comparison) -> Chart:
    lines = (
        ("Rooftile", "ours", "compulsory"),
        ("standard", "standard", "standard"),
        ("no cache", "due", "tiled"),
    )
    series = [
        Series(name=name, kind=kind, points=tuple((float(row.N), float(getattr(row, what))) for row in comparison.traffic))
        for name, kind, what in lines
    ]
    rows = [[f"{row.N:,}", *(size(getattr(row, what)) for *_, what in lines)] for row in comparison.traffic]
    title = claims.traffic_claim(comparison)
    picture = charts.log_chart(series, title=title, y_name="bytes", write=size)
    note = (
        "Forward and backward, from the cost model. Minimum: each input read once, each output written once. "
        "Without a cache: every tile is read from memory again."
    )
    return Chart(title, safe(picture), note, Table(["tokens", *(name for name, *_ in lines)], rows))


def sizes_table(report: Report, N: int, element: int) -> Table:
    """Lists the sizes of this run and of the machine, smallest first."""
    rows = []
    if report.tiling:
        tile = report.tiling.block_t * report.tiling.block_s * 4
        rows.append((f"one tile of scores, {report.tiling.block_t} × {report.tiling.block_s}", tile))
    if report.machine and report.machine.device["l2_bytes"]:
        rows.append(("this machine's L2 cache", report.machine.device["l2_bytes"]))
    rows.append((f"one head's score matrix at {N:,} tokens", N * N * element))
    if report.comparison:
        for side in report.comparison.sides:
            if N in report.comparison.of(side):
                peak = report.comparison.of(side)[N].training_peak_bytes
                rows.append((f"peak memory of {NAMES[side]} at {N:,} tokens, measured", peak))
    if report.machine:
        rows.append(("this machine's memory", report.machine.device["memory_bytes"]))
    return Table(["what", "size"], [[what, size(value)] for what, value in sorted(rows, key=lambda row: row[1])])


def window_bars(tiling: Tiling) -> Chart:
    """Draws the time of each mask, Rooftile's beside SDPA's."""
    rows = []
    for tile_map in tiling.maps:
        for name, kind, us in (("Rooftile", "ours", tile_map.forward_us), ("SDPA", "other", tile_map.sdpa_us)):
            rows.append((f"{tile_map.mask}, {name}", kind, us, duration(us)))
    title = f"Forward at {tiling.window.N:,} tokens under each mask"
    note = "SDPA has words for no mask and for a causal one. Others it gets as a boolean matrix, and computes every score."
    return Chart(title, safe(charts.bars(rows, title=title)), note)


def loss_chart(training: Training, first: float, last: float) -> Chart:
    title = f"Both learn: the loss falls from {first:.2f} to {last:.2f} nats per byte"
    names = ("SDPA", "Rooftile")
    series = [
        Series(name=name, kind=kind, points=tuple((float(n + 1), loss) for n, loss in enumerate(run.losses)))
        for name, kind, run in zip(names, ("other", "ours"), training.runs, strict=True)
    ]
    every = max(len(training.runs[0].losses) // 10, 1)
    steps = [*range(0, len(training.runs[0].losses), every), len(training.runs[0].losses) - 1]
    rows = [
        [f"{n + 1}", *(f"{run.losses[n]:.5f}" for run in training.runs), claims.short(abs(training.runs[0].losses[n] - training.runs[1].losses[n]))]
        for n in sorted(set(steps))
    ]  # fmt: skip
    picture = charts.line_chart(series, title=title, x_name="step", y_name="loss", write=lambda y: f"{y:g}")
    return Chart(
        title,
        safe(picture),
        "Broad line: SDPA. Thin line: Rooftile. The two add in different orders, so their last digits differ; training amplifies that slowly.",
        Table(["step", *names, "apart"], rows),
    )


def loss_bars(bits: PrecisionErrors, distribution: str) -> Chart:
    """Draws the error of each recipe on a distribution."""
    title = claims.distribution_claim(bits, distribution)
    found = bits.losses[distribution]
    kinds = {"native": "plain", PLAINEST: "standard", "fp8": "ours", "int8": "ours"}
    names = {"native": f"{bits.dtype}, for comparison"}
    rows = [
        (names.get(loss.recipe, loss.recipe), kinds.get(loss.recipe, "soft"), loss.rmse, power(loss.rmse)) for loss in found
    ]  # fmt: skip
    table = Table(
        ["recipe", "RMSE", "better", "largest error", "1 − cosine", "largest error of lse", "forward"],
        [
            [
                loss.recipe, power(loss.rmse), times(loss.better), power(loss.largest), power(1 - loss.cosine), power(loss.lse),
                duration(loss.time_us) + " (plain operations)" * (loss.ran == "eager"),
            ]
            for loss in found
        ],
    )  # fmt: skip
    return Chart(
        title,
        safe(charts.bars(rows, title=title)),
        'Root mean squared error against fp64: shorter is better. Blue: what precision="fp8" and "int8" choose.',
        table,
    )


def step_charts(training: Training) -> list[Chart]:
    sdpa, ours = training.runs
    shown = []
    for what, words, write in (
        ("step_ms", "Time of a step", lambda ms: duration(ms * 1e3)),
        ("peak_bytes", "Peak memory of a step", size),
    ):
        values = [getattr(run, what) for run in (sdpa, ours)]
        title = f"{words}: {claims.standing_of_step(training, what)}"
        rows = [
            (name, kind, value, write(value))
            for name, kind, value in zip(("SDPA", "Rooftile"), ("other", "ours"), values, strict=True)
        ]
        note = (
            "The median over the run. The two ran in turns, step by step."
            if what == "step_ms"
            else "Measured in one step, beyond weights and optimiser state."
        )
        shown.append(Chart(title, safe(charts.bars(rows, title=title)), note))
    return shown


def allocator_chart(served: Served, serving: Serving) -> Chart:
    """Draws the blocks of one allocator over time."""
    title = claims.allocator_claim(served)
    steps = max(serving.contiguous.steps, serving.paged.steps)
    picture = block_map.block_map(served, title=title, blocks=serving.plan.blocks, steps=steps)
    note = {
        "contiguous": (
            "Each answer reserves memory for the longest text when it begins. Faint slots are reserved but unused. Blank areas are too small "
            "for the next request, which may need several reservations at once."
        ),
        "paged": "An answer gets a block when its last one is full, so few slots are unused, and freed blocks are reused.",
    }[served.allocator]
    return Chart(title, safe(picture), note)


def pace_table(serving: Serving) -> Table:
    """Compares both allocators, quantity by quantity."""
    quantities: tuple[tuple[str, Callable[[Served], str]], ...] = (
        ("answers at once", lambda served: number(served.running)),
        ("used slots that are empty", lambda served: percent(served.waste)),
        ("blocks saved by sharing", lambda served: percent(served.saved)),
        ("steps", lambda served: f"{served.steps:,}"),
        ("tokens per second", lambda served: number(served.tokens_s)),
        ("requests computed again", lambda served: f"{served.preemptions}"),
    )
    rows = [[name, write(serving.contiguous), write(serving.paged)] for name, write in quantities]
    return Table(["", "reserved", "paged"], rows)


def samples_chart(samples: Samples) -> Chart:
    """Draws the block tables of several answers to one prompt, with their texts."""
    title = claims.samples_claim(samples)
    rows = [
        [f"answer {n}", ", ".join(str(block) for block in table.blocks), repr(answer)]
        for n, (table, answer) in enumerate(zip(samples.tables, samples.answers, strict=True), 1)
    ]
    note = (
        f"The last step in which all run. Solid cells are the prompt's {samples.shared} full blocks, stored once for all answers; faint cells "
        "belong to one answer. If the prompt ends inside a block, each answer except the last to write into it has a copy."
    )
    picture = block_map.sample_tables(samples, title=title)
    return Chart(title, safe(picture), note, Table(["", "blocks", "text"], rows))
