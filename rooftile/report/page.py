"""The report as one HTML file: charts, sentences and tables from the numbers, and the numbers themselves.

`page.html` is the frame, `page.css` the looks. The file loads nothing: it opens offline, on a phone and in the dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, NamedTuple

from rooftile.errors import InvalidInput
from rooftile.report import claims, draw
from rooftile.report.comparison import OURS, STANDARD, TILED, Comparison, Reading
from rooftile.report.draw import Series
from rooftile.report.experiments import Report
from rooftile.report.machine import Machine
from rooftile.report.tiles import Tiling, online_softmax
from rooftile.report.training import Training
from rooftile.report.units import duration, percent, power, size, times

KINDS = {OURS: "ours", STANDARD: "standard", TILED: "other"}
NAMES = {OURS: "exact", STANDARD: "standard", TILED: "exact, Rooftile's tiles"}
ONLINE_ROW = ((0.5, 2.0, 1.0), (3.0, 0.0, 2.5))


class Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Chart(NamedTuple):
    """A picture with the claim over it, words under it, and its numbers."""

    title: str
    picture: Any  # SVG, marked as safe
    note: str = ""
    table: Table | None = None


def check_ready() -> None:
    """Raises InvalidInput where jinja2 is not installed: before minutes of measuring, not after."""
    if find_spec("jinja2") is None:
        raise InvalidInput("the page needs the package jinja2, which is not installed; pip install 'rooftile[report]'")


def render(report: Report) -> str:
    """The page. Needs jinja2."""
    from jinja2 import Environment, StrictUndefined

    here = files("rooftile.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((here / "page.html").read_text()).render(
        css=_safe((here / "page.css").read_text()),
        report={
            "failures": report.failures,
            "missing": report.missing,
            "reproduction": report.reproduction,
            "quick": report.plan.is_quick,
        },
        device_name=report.machine.device["name"] if report.machine else report.plan.device,
        headline=claims.headline(report.comparison) if report.comparison else "Exact attention, measured on this machine",
        tiles_of_numbers=_numbers(report),
        comparison=report.comparison and _comparison(report.comparison),
        why=_why(report),
        masks=report.tiling and _masks(report.tiling),
        model=report.training and _model(report.training, report),
        machine=report.machine and _machine(report.machine),
        not_shown=_not_shown(report),
        environment=_environment(report),
        # `<` would let a string in the data end the script element
        numbers=_safe(json.dumps(report.json(), allow_nan=True).replace("<", "\\u003c")),
    )


def _safe(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)  # noqa: S704 - our own SVG, CSS and JSON


def _numbers(report: Report) -> list[dict[str, str]]:
    """The four figures at the top."""
    shown = []
    if report.comparison:
        N = claims.common_length(report.comparison)
        memory, *less = claims.standing(report.comparison, "training_peak_bytes").split(" ", 1)
        speed, *faster = claims.standing(report.comparison, "step_us").split(" ", 1)
        shown.append({"big": memory, "small": f"{' '.join(less)}, forward and backward at {N:,} tokens"})
        shown.append({"big": speed, "small": f"{' '.join(faster)}, forward and backward at {N:,} tokens"})
    if report.tiling:
        most = max(report.tiling.maps, key=lambda tile_map: tile_map.saved)
        shown.append({"big": percent(most.saved), "small": f"of the scores never computed under {most.mask}"})
    if report.training:
        apart = report.training.furthest_apart
        shown.append({"big": claims.short(apart), "small": "the most that two Llamas' losses ever differ, eager and Rooftile"})
    return shown


def _comparison(comparison: Comparison) -> dict[str, Any]:
    def chart(what: str, title: str, y_name: str, write: Callable[[float], str], note: str = "") -> Chart:
        return _length_chart(comparison, what, title, y_name, write, note)

    fused = {
        "sdpa": "On this machine dispatch hands this problem to PyTorch's own fused kernel; Rooftile's own tiles run beside it.",
        "eager": "On this machine only the definition runs this problem.",
    }.get(comparison.backends[OURS], "")
    precision = {"fp32": "single", "bf16": "bfloat16", "fp16": "half"}[comparison.dtype]
    return {
        "setup": (
            "Standard attention is the textbook's: a matrix product, a softmax, a matrix product, in plain PyTorch. "
            f"Exact attention is rooftile.attention, which ran on its {comparison.backends[OURS]} backend. {fused} "
            f"Both get the same {comparison.batch} × {comparison.heads} heads of {comparison.dim} numbers a token in {precision} "
            "precision, no mask, so that neither gains by skipping."
        ),
        "reach": claims.scaling_claim(comparison) + ".",
        "stops": [f"{NAMES[side].capitalize()}: {reason}." for side, reason in comparison.stopped.items()],
        "charts": [
            chart("forward_us", claims.time_claim(comparison, "forward_us"), "time", duration),
            chart("backward_us", claims.time_claim(comparison, "backward_us"), "time", duration),
            chart("forward_peak_bytes", claims.memory_claim(comparison, "forward_peak_bytes"), "peak memory", size),
            chart("training_peak_bytes", claims.memory_claim(comparison, "training_peak_bytes"), "peak memory", size),
            chart("forward_error", claims.error_claim(comparison, "forward_error"), "relative error", power),
            chart("backward_error", claims.error_claim(comparison, "backward_error"), "relative error", power),
        ],
        "method": (
            f"Times are medians of calls taken in turns, after a check against the definition. Memory is measured ({comparison.peak_kind}), "
            "beyond the inputs. Errors are |x − exact| / |exact| against a computation in 64 bits, on sampled rows and heads; the "
            "gradient's is the worst of dq, dk and dv."
        ),
    }  # fmt: skip


def _length_chart(
    comparison: Comparison, what: str, title: str, y_name: str, write: Callable[[float], str], note: str
) -> Chart:
    series = [
        Series(name=NAMES[side], kind=KINDS[side], points=_points(comparison.of(side), what)) for side in comparison.sides
    ]
    N = claims.common_length(comparison)
    ours, theirs = (getattr(comparison.of(side)[N], what) for side in (OURS, STANDARD))
    ratio = times(max(ours, theirs) / min(ours, theirs)) if min(ours, theirs) > 0 else ""
    lengths = sorted({reading.N for reading in comparison.readings})
    rows = []
    for length in lengths:
        readings = [comparison.of(side).get(length) for side in comparison.sides]
        rows.append([f"{length:,}", *(write(getattr(reading, what)) if reading else "–" for reading in readings)])
    table = Table(["tokens", *(NAMES[side] for side in comparison.sides)], rows)
    picture = draw.log_chart(series, title=title, y_name=y_name, write=write, bracket=(N, ratio) if ratio else None)
    return Chart(title, _safe(picture), note, table)


def _points(readings: dict[int, Reading], what: str) -> tuple[tuple[float, float], ...]:
    return tuple((float(N), float(getattr(reading, what))) for N, reading in sorted(readings.items()))


def _traffic_chart(comparison: Comparison) -> Chart:
    lines = (("exact, at least", "ours", "compulsory"), ("standard", "standard", "standard"), ("exact, no cache", "other", "tiled"))
    series = [
        Series(name=name, kind=kind, points=tuple((float(row.N), float(getattr(row, what))) for row in comparison.traffic))
        for name, kind, what in lines
    ]
    rows = [[f"{row.N:,}", *(size(getattr(row, what)) for *_, what in lines)] for row in comparison.traffic]
    title = claims.traffic_claim(comparison)
    last = comparison.traffic[-1]
    picture = draw.log_chart(
        series, title=title, y_name="bytes", write=size, bracket=(last.N, times(last.standard / last.compulsory))
    )
    note = (
        "Forward and backward, from the cost model. At least: each input read once, each output written once. "
        "No cache: every tile read again from memory."
    )
    return Chart(title, _safe(picture), note, Table(["tokens", *(name for name, *_ in lines)], rows))


def _why(report: Report) -> dict[str, Any]:
    steps = online_softmax(ONLINE_ROW)
    whole = [score for scores in ONLINE_ROW for score in scores]
    exact = sum(math.exp(score - max(whole)) for score in whole)
    N = claims.common_length(report.comparison) if report.comparison else report.plan.lengths[-1]
    element = {"fp32": 4, "bf16": 2, "fp16": 2}[report.plan.dtype]
    return {
        "N": N,
        "matrix": size(N * N * element),
        "ladder": _ladder(report, N, element),
        "traffic": report.comparison and _traffic_chart(report.comparison),
        "online": [
            {
                "after": f"tile {n + 1}",
                "scores": ", ".join(f"{score:g}" for score in step.scores),
                "largest": f"{step.largest:g}",
                "rescale": f"{step.rescale:.3f}" if n else "–",
                "sum": f"{step.sum:.4f}",
            }
            for n, step in enumerate(steps)
        ],
        "online_note": f"The whole row at once gives the sum {exact:.4f}: the same.",
    }


def _ladder(report: Report, N: int, element: int) -> Chart | None:
    """What fits where, with the sizes of this run."""
    rows = []
    if report.tiling:
        tile = report.tiling.block_t * report.tiling.block_s * 4
        rows.append((f"one tile of scores, {report.tiling.block_t} × {report.tiling.block_s}", tile, "ours"))
    if report.machine and report.machine.device["l2_bytes"]:
        rows.append(("this machine's L2 cache", report.machine.device["l2_bytes"], "plain"))
    rows.append((f"one head's score matrix at {N:,} tokens", N * N * element, "standard"))
    if report.comparison:
        peak = report.comparison.of(STANDARD)[N].training_peak_bytes
        rows.append((f"all that standard attention held at {N:,}, measured", peak, "standard"))
        peak = report.comparison.of(OURS)[N].training_peak_bytes
        rows.append((f"all that exact attention held at {N:,}, measured", peak, "ours"))
    if report.machine:
        rows.append(("this machine's memory", report.machine.device["memory_bytes"], "plain"))
    rows.sort(key=lambda row: row[1])
    title = "What fits where"
    return Chart(title, _safe(draw.size_ladder(rows, title=title)), "Each bar's length grows with the logarithm of its size.")


def _masks(tiling: Tiling) -> dict[str, Any]:
    full = tiling.maps[0]
    maps = []
    for tile_map in tiling.maps:
        skipped = f", {tile_map.skipped:,} skipped" if tile_map.skipped else ""
        time = claims.tile_time_claim(tile_map, full) if tile_map is not full else duration(full.forward_us)
        maps.append(
            {
                "name": tile_map.mask,
                "picture": _safe(draw.mask_tiles(tile_map, title=tile_map.mask)),
                "counts": f"{len(tile_map.visits):,} tiles computed, {tile_map.masked:,} of them masked{skipped}; "
                f"{percent(tile_map.saved)} of the scores left out",
                "time": time,
            }
        )
    rows = [
        [
            tile_map.mask, f"{len(tile_map.visits):,}", f"{tile_map.masked:,}", f"{tile_map.skipped:,}", percent(tile_map.saved),
            f"{tile_map.visible_pairs / tile_map.N**2:.1%}", duration(tile_map.forward_us),
        ]
        for tile_map in tiling.maps
    ]  # fmt: skip
    return {
        "claim": claims.tiles_claim(tiling.maps),
        "setup": (
            f"Queries run down, keys across, {full.N:,} of each, in tiles of up to {tiling.block_t} × {tiling.block_s}. Each mask lets "
            f"a query see one stretch of keys, so a kernel knows from two numbers which tiles to visit. These are the tiles that "
            f"the {tiling.backend} backend walks, and the time of its forward on this machine."
        ),
        "maps": maps,
        "table": Table(["mask", "computed", "masked", "skipped", "left out", "visible pairs", "forward"], rows),
    }  # fmt: skip


def _model(training: Training, report: Report) -> dict[str, Any]:
    plan = report.plan.model
    first, last = claims.learning(training.runs[1])
    return {
        "claim": claims.loss_claim(training),
        "setup": (
            f"A Llama of Hugging Face Transformers with {training.parameters:,} random weights learns English from Python's own "
            f"language reference (pydoc_data.topics, {training.text_bytes:,} bytes, one token a byte): {plan.steps} steps of "
            f"{plan.batch} × {plan.length:,} tokens. It is trained twice, from the same weights on the same batches. One word differs."
        ),
        "charts": [_loss_chart(training, first, last), _difference_chart(training), *_step_charts(training)],
        "written_title": "Then it writes",
        "prompt": training.prompt,
        "written": training.written,
        "written_note": (
            f"{len(training.written)} characters sampled from the model trained with Rooftile, through generate and its key/value "
            f"cache. {plan.steps} steps teach a small model letters and layout, not sense."
        ),
    }  # fmt: skip


def _loss_chart(training: Training, first: float, last: float) -> Chart:
    title = f"Both learn: the loss falls from {first:.2f} to {last:.2f} nats a byte"
    names = ("eager", "Rooftile")
    series = [
        Series(name=name, kind=kind, points=tuple((float(n + 1), loss) for n, loss in enumerate(run.losses)))
        for name, kind, run in zip(names, ("standard", "ours"), training.runs, strict=True)
    ]
    every = max(len(training.runs[0].losses) // 10, 1)
    steps = [*range(0, len(training.runs[0].losses), every), len(training.runs[0].losses) - 1]
    rows = [
        [f"{n + 1}", *(f"{run.losses[n]:.5f}" for run in training.runs), claims.short(abs(training.runs[0].losses[n] - training.runs[1].losses[n]))]
        for n in sorted(set(steps))
    ]  # fmt: skip
    picture = draw.line_chart(series, title=title, x_name="step", y_name="loss", write=lambda y: f"{y:g}")
    return Chart(title, _safe(picture), "The broad line is eager, the thin one Rooftile.", Table(["step", *names, "apart"], rows))


def _difference_chart(training: Training) -> Chart:
    eager, ours = (run.losses for run in training.runs)
    apart = [abs(a - b) for a, b in zip(eager, ours, strict=True)]
    title = f"The two losses differ by {claims.short(sorted(apart)[len(apart) // 2])} at the median step"
    series = [
        Series(name="apart", kind="other", points=tuple((float(n + 1), d) for n, d in enumerate(apart)))
    ]
    picture = draw.line_chart(series, title=title, x_name="step", y_name="difference", write=power, log=True)
    note = "Both sum in another order, so they round differently, and training makes small differences grow."
    return Chart(title, _safe(picture), note)


def _step_charts(training: Training) -> list[Chart]:
    eager, ours = training.runs
    charts = []
    for what, words, write in (("step_ms", "Time of a step", lambda ms: duration(ms * 1e3)), ("peak_bytes", "Peak memory of a step", size)):
        values = [getattr(run, what) for run in (eager, ours)]
        title = f"{words}: {claims.standing_of_step(training, what)}"
        rows = [(name, kind, value, write(value)) for name, kind, value in zip(("eager", "Rooftile"), ("standard", "ours"), values, strict=True)]
        note = "The median over the run." if what == "step_ms" else "Measured in one step, beyond weights and optimiser state."
        charts.append(Chart(title, _safe(draw.bars(rows, title=title)), note))
    return charts


def _machine(machine: Machine) -> dict[str, Any]:
    device = machine.device
    able = [name for name, reasons in machine.verdicts.items() if not reasons]
    backends = []
    for name, reasons in machine.verdicts.items():
        words = "does not run here: " + "; ".join(reasons) if reasons else "runs"
        backends.append((name, "runs, and is chosen" if name == machine.chosen else words))
    unit = "cores" if device["type"] == "cpu" else "multiprocessors"
    return {
        "claim": f"It copies {machine.roofs[0].measured:,.0f} GB/s and multiplies {_best(machine)}",
        "sheet_word": "datasheet" if "datasheet" in machine.datasheet else "assumed" if machine.datasheet else "datasheet",
        "roofs": [
            (roof.what, f"{roof.measured:,.3g} {roof.unit}", f"{roof.datasheet:,.3g} {roof.unit}" if roof.datasheet else "–")
            for roof in machine.roofs
        ],
        "roofs_note": (
            f"{device['name']}, {device['cores']} {unit}, {size(device['memory_bytes'])} of memory. "
            f"Measured {machine.measured_on[:10]} on random data; right column: {machine.datasheet or 'this chip is not in the table'}."
        ),
        "backends_claim": f"{len(able)} of {len(machine.verdicts)} backends run here",
        "backends": backends,
        "problem": machine.problem,
    }  # fmt: skip


def _best(machine: Machine) -> str:
    best = max(machine.roofs[1:], key=lambda roof: roof.measured)
    return f"{best.measured:,.3g} {best.unit} in {best.what.split()[0]}"


def _not_shown(report: Report) -> str:
    sentences = [
        "One machine, one run, one shape of problem: other head dimensions, other lengths of batch and other machines differ.",
        "Standard attention here is written in three plain operations, without torch.compile; other fused kernels are not raced, "
        "rooftile bench attention does that.",
        "Bytes moved are counted by a model, not read from hardware counters.",
        "The Llama is tiny and its training short: the curves show that nothing changes, not what a large model would gain.",
    ]
    if report.plan.device == "cpu":
        sentences.append("Nothing here ran on a GPU, where the gap in time is larger than on a CPU's few cores.")
    sentences.append("Other programs that ran at the same time are in the times, and cannot be told apart from them.")
    return " ".join(sentences)


def _environment(report: Report) -> str:
    device = report.machine.device if report.machine else {}
    words = [f"Rooftile {report.reproduction['rooftile']}"]
    words += [f"commit {report.reproduction['commit']}"] * bool(report.reproduction["commit"])
    for name in ("torch", "triton", "python"):
        if device.get(name):
            words.append(f"{name} {device[name]}")
    words += [f"{device['name']}, driver or kernel {device['driver']}"] * bool(device)
    taken = sum(report.seconds.values())
    return f"{', '.join(words)}. {report.reproduction['date']}. The experiments took {taken:,.0f} s."
