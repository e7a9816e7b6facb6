"""The report as one HTML file: charts, sentences and tables from the numbers, and the numbers themselves.

`page.html` is the frame, `page.css` the looks. The file loads nothing: it opens offline, on a phone and in the dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from rooftile.errors import InvalidInput
from rooftile.report import claims, draw, figures
from rooftile.report.comparison import OURS, Comparison
from rooftile.report.experiments import Report
from rooftile.report.few_bits import FewBits
from rooftile.report.machine import Machine
from rooftile.report.serving import Serving
from rooftile.report.tiles import Tiling, online_softmax
from rooftile.report.training import Training
from rooftile.report.units import duration, number, percent, power, size, times

ONLINE_ROW = ((0.5, 2.0, 1.0), (3.0, 0.0, 2.5))


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
        css=figures.safe((here / "page.css").read_text()),
        report={
            "failures": report.failures,
            "missing": report.missing,
            "reproduction": report.reproduction,
            "quick": report.plan.is_quick,
        },
        device_name=report.machine.device["name"] if report.machine else report.plan.device,
        headline=claims.headline(report.comparison)
        if report.comparison
        else "Exact attention, measured on this machine",
        tiles_of_numbers=_numbers(report),
        comparison=report.comparison and _comparison(report.comparison),
        why=_why(report),
        masks=report.tiling and _masks(report.tiling),
        few_bits=report.few_bits and _few_bits(report.few_bits),
        model=report.training and _model(report.training, report),
        on_cpu=report.plan.device == "cpu",
        serving=report.serving and _serving(report.serving),
        machine=report.machine and _machine(report.machine),
        not_shown=_not_shown(report),
        environment=_environment(report),
        # `<` would let a string in the data end the script element
        numbers=figures.safe(json.dumps(report.json(), allow_nan=False).replace("<", "\\u003c")),
    )


def _numbers(report: Report) -> list[dict[str, str]]:
    """The four figures at the top."""
    shown = []
    if report.comparison:
        N = claims.common_length(report.comparison)
        for what in ("training_peak_bytes", "step_us"):
            big, small = claims.split(claims.standing(report.comparison, what))
            shown.append({"big": big, "small": f"{small}, forward and backward at {N:,} tokens"})
    if report.tiling:
        most = max(report.tiling.maps, key=lambda tile_map: tile_map.saved)
        shown.append({"big": percent(most.saved), "small": f"of the scores never computed under {most.mask}"})
    if report.training:
        apart = report.training.furthest_apart
        shown.append(
            {"big": claims.short(apart), "small": "the most that two Llamas' losses ever differ, eager and Rooftile"}
        )
    return shown


def _comparison(comparison: Comparison) -> dict[str, Any]:
    charts: tuple[tuple[str, Callable[[Comparison, str], str], str, Callable[[float], str]], ...] = (
        ("forward_us", claims.time_claim, "time", duration),
        ("backward_us", claims.time_claim, "time", duration),
        ("forward_peak_bytes", claims.memory_claim, "peak memory", size),
        ("training_peak_bytes", claims.memory_claim, "peak memory", size),
        ("forward_error", claims.error_claim, "relative error", power),
        ("backward_error", claims.error_claim, "relative error", power),
    )
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
        "stops": [f"{figures.NAMES[side][0].upper()}{figures.NAMES[side][1:]}: {reason}." for side, reason in comparison.stopped.items()],
        "charts": [
            figures.length_chart(comparison, what, claim(comparison, what), y_name, write) for what, claim, y_name, write in charts
        ],
        "method": (
            f"Times are medians of calls taken in turns, after a check against the definition. Memory is measured ({comparison.peak_kind}), "
            "beyond the inputs. Errors are |x − exact| / |exact| against a computation in 64 bits, on sampled rows and heads; the "
            "gradient's is the worst of dq, dk and dv."
        ),
    }  # fmt: skip


def _why(report: Report) -> dict[str, Any]:
    steps = online_softmax(ONLINE_ROW)
    whole = [score for scores in ONLINE_ROW for score in scores]
    exact = sum(math.exp(score - max(whole)) for score in whole)
    N = claims.common_length(report.comparison) if report.comparison else report.plan.lengths[-1]
    element = {"fp32": 4, "bf16": 2, "fp16": 2}[report.plan.dtype]
    return {
        "N": N,
        "matrix": _matrix_words(report, N * N * element),
        "ladder": figures.size_ladder(report, N, element),
        "traffic": report.comparison and figures.traffic_chart(report.comparison),
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


def _matrix_words(report: Report, matrix: int) -> str:
    """What one head's matrix weighs, against the cache where that is known and smaller."""
    cache = report.machine.device["l2_bytes"] if report.machine else 0
    words = f"one such matrix takes {size(matrix)} a head"
    if 0 < cache < matrix:
        return f"{words}, {times(matrix / cache)} this machine's L2 cache of {size(cache)}, so the processor waits for memory"
    return f"{words}, and four times as much at twice the length: soon more than any cache holds"


def _masks(tiling: Tiling) -> dict[str, Any]:
    full = tiling.maps[0]
    maps = []
    for tile_map in tiling.maps:
        is_full = tile_map is full
        saved = f"{tile_map.skipped:,} skipped; {percent(tile_map.saved)} of the scores left out"
        maps.append(
            {
                "name": tile_map.mask,
                "picture": figures.safe(draw.mask_tiles(tile_map, title=tile_map.mask)),
                "counts": f"{len(tile_map.visits):,} tiles computed, {tile_map.masked or 'none'} of them masked, "
                + ("none skipped" if is_full else saved),
                "time": f"forward in {duration(full.forward_us)}"
                if is_full
                else claims.tile_time_claim(tile_map, full),
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
        "table": figures.Table(["mask", "computed", "masked", "skipped", "left out", "visible pairs", "forward"], rows),
    }  # fmt: skip


def _few_bits(bits: FewBits) -> dict[str, Any]:
    return {
        "claim": claims.few_bits_claim(bits),
        "setup": (
            f"Queries, keys and values of {bits.length:,} tokens, {bits.heads} heads of {bits.dim} numbers, are rounded to 8 bits, and so "
            "are the weights. With outliers, one entry in a thousand is ten times as large: one scale for a whole tensor then spends "
            "its bits on them. A rotation of queries and keys alike leaves every score as it is and spreads each outlier over its row; a "
            "scale a block, or INT8 for the scores, does the rest. rooftile.attention(..., precision=\"fp8\") is all that a program "
            "changes, and rooftile accuracy --tensors FILE shows the same for tensors of your own."
        ),
        "charts": [figures.loss_bars(bits, distribution) for distribution in bits.losses],
        "note": f"Means over {bits.draws} draws. Where a time says plain operations, no kernel of this machine computes the recipe: it shows the numbers, not the speed.",
    }  # fmt: skip


def _model(training: Training, report: Report) -> dict[str, Any]:
    plan, steps = report.plan.model, len(training.runs[0].losses)
    precision = "single precision" if plan.dtype == "fp32" else f"{plan.dtype} autocast"
    first, last = claims.learning(training.runs[1])
    return {
        "claim": claims.loss_claim(training),
        "setup": (
            f"A Llama of Hugging Face Transformers with {training.parameters:,} random weights learns English from Python's own "
            f"language reference (pydoc_data.topics, {training.text_bytes:,} bytes, a paragraph a line, one token a byte): {steps:,} steps of "
            f"{plan.batch} × {plan.length:,} tokens. It is trained twice, from the same weights on the same batches, in {precision}. One word differs."
            + f" It was to be {plan.steps:,} steps; this machine's time ran out." * (steps < plan.steps)
        ),
        "charts": [figures.loss_chart(training, first, last), figures.difference_chart(training), *figures.step_charts(training)],
        "written_title": "Then it writes",
        "prompt": training.prompt,
        "written": training.written,
        "written_note": (
            f"{len(training.written)} characters sampled from the model trained with Rooftile, through generate and its key/value "
            f"cache. {steps:,} steps teach a small model letters, words and layout, not sense."
        ),
    }  # fmt: skip


def _serving(serving: Serving) -> dict[str, Any]:
    return {
        "claim": claims.serving_claim(serving),
        "setup": claims.serving_setup(serving),
        "maps": [figures.allocator_chart(served, serving) for served in (serving.contiguous, serving.paged)],
        "pace_claim": claims.pace_claim(serving),
        "pace": figures.pace_table(serving),
        "samples": figures.samples_chart(serving.samples),
        "check": claims.check_claim(serving.check),
    }


def _machine(machine: Machine) -> dict[str, Any]:
    device = machine.device
    able = [name for name, reasons in machine.verdicts.items() if not reasons]
    backends = []
    for name, reasons in machine.verdicts.items():
        words = "does not run here: " + "; ".join(reasons) if reasons else "runs"
        backends.append((name, "runs, and is chosen" if name == machine.chosen else words))
    unit = "cores" if device["type"] == "cpu" else "multiprocessors"
    return {
        "claim": f"It copies {number(machine.roofs[0].measured)} GB/s and multiplies {_best(machine)}",
        "sheet_word": "datasheet" if "datasheet" in machine.datasheet else "assumed" if machine.datasheet else "datasheet",
        "roofs": [
            (f"{roof.what}, {roof.unit}", number(roof.measured), number(roof.datasheet) if roof.datasheet else "–")
            for roof in machine.roofs
        ],
        "roofs_note": (
            f"{device['name']}, {device['cores']} {unit}, {size(device['memory_bytes'])} of memory. "
            f"Measured {machine.measured_on[:10]} on random data; right column: {machine.datasheet or 'this chip is not in the table'}."
        ),
        "backends_claim": f"{len(able)} of {len(machine.verdicts)} backends run a causal training step here",
        "backends": backends,
        "problem": machine.problem,
    }  # fmt: skip


def _best(machine: Machine) -> str:
    best = max(machine.roofs[1:], key=lambda roof: roof.measured)
    return f"{number(best.measured)} {best.unit} in {best.what.split()[0]}"


def _not_shown(report: Report) -> str:
    sentences = [
        "One machine, one run, one shape of problem: other head dimensions, other batches and other machines differ.",
        "Standard attention here is written in three plain operations, without torch.compile; other fused kernels are not "
        "raced here: rooftile bench attention does that.",
        "Bytes moved are counted by a model, not read from hardware counters.",
        "The Llama is tiny and its training short: the curves show that nothing changes, not what a large model would gain.",
    ]
    if report.serving:
        sentences.append(
            f"What was served are {report.serving.plan.requests} requests for short texts by that Llama, whose lengths were drawn "
            "beforehand: a large model on many requests gains by other factors."
        )
    if report.plan.device == "cpu":
        sentences.append("Nothing here ran on a GPU.")
    sentences.append("Other programs that ran at the same time are in the times, and cannot be told apart from them.")
    return " ".join(sentences)


def _environment(report: Report) -> str:
    device = report.machine.device if report.machine else {}
    words = [f"Rooftile {report.reproduction['rooftile']}"]
    words += [f"commit {report.reproduction['commit']}"] * bool(report.reproduction["commit"])
    for name in ("torch", "triton", "python"):
        if device.get(name):
            words.append(f"{name} {device[name]}")
    if device:
        driver = "driver" if device["type"] == "cuda" else "kernel"
        words.append(f"{device['name']} ({driver} {device['driver']})")
    taken = sum(report.seconds.values())
    return f"{', '.join(words)}. {report.reproduction['date']}. The experiments took {taken:,.0f} s."
