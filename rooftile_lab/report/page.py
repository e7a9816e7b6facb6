"""The report as one HTML file: charts, sentences and tables from the numbers, and the numbers themselves.

`page.html` is the template. The file loads nothing: it works offline, on a phone and in dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rooftile.drawing import page
from rooftile.drawing.page import Table, json_element, safe
from rooftile.drawing.units import duration, percent, power, size, times
from rooftile_lab.report import (
    approximate_section,
    claims,
    context_section,
    diagnosis_section,
    experts_section,
    figures,
    formats_section,
    histories_section,
    machine_section,
    recall_section,
    top,
    weights_section,
)
from rooftile_lab.report.comparison import OURS, Comparison
from rooftile_lab.report.experiments import Report
from rooftile_lab.report.mask_tiles import mask_tiles
from rooftile_lab.report.precision import PrecisionErrors
from rooftile_lab.report.serving import Serving
from rooftile_lab.report.tiles import Tiling, online_softmax
from rooftile_lab.report.training import Training

ONLINE_ROW = ((0.5, 2.0, 1.0), (3.0, 0.0, 2.5))


def render(report: Report) -> str:
    """Renders the page. Needs jinja2."""
    return page.render(
        "rooftile_lab.report",
        "page.html",
        report={
            "failures": report.failures,
            "missing": report.missing,
            "reproduction": report.reproduction,
            "quick": report.plan.is_quick,
        },
        device_name=report.machine.device["name"] if report.machine else report.plan.device,
        headline=claims.headline(report.tiling) if report.tiling else "Exact attention, measured on this machine",
        tiles_of_numbers=top.numbers(report),
        load=top.load_words(report),
        contents=top.CONTENTS,
        comparison=report.comparison and _comparison(report.comparison),
        why=_why(report),
        masks=report.tiling and _masks(report.tiling),
        precision=report.precision and _precision(report.precision),
        approximate=report.approximate and approximate_section.section(report.approximate, report.spread),
        model=report.training and _model(report.training, report),
        on_cpu=report.plan.device == "cpu",
        serving=report.serving and _serving(report.serving),
        weights=report.weights and weights_section.section(report.weights),
        formats=report.formats and formats_section.section(report.formats),
        diagnosis=report.diagnosis
        and diagnosis_section.section(report.diagnosis, report.machine.ceilings if report.machine else None),
        recall=report.recall and recall_section.section(report.recall),
        context=report.context and context_section.section(report.context),
        experts=report.experts and experts_section.section(report.experts),
        histories=report.histories and histories_section.section(report.histories),
        machine=report.machine and machine_section.section(report.machine),
        not_shown=_not_shown(report),
        environment=_environment(report),
        numbers=json_element(report.json()),
    )


def _comparison(comparison: Comparison) -> dict[str, Any]:
    charts: tuple[tuple[str, Callable[[Comparison, str], str], str, Callable[[float], str]], ...] = (
        ("forward_us", claims.time_claim, "time", duration),
        ("backward_us", claims.time_claim, "time", duration),
        ("forward_peak_bytes", claims.memory_claim, "peak memory", size),
        ("training_peak_bytes", claims.memory_claim, "peak memory", size),
        ("forward_error", claims.error_claim, "relative error", power),
        ("backward_error", claims.error_claim, "relative error", power),
    )
    drawn = [
        figures.length_chart(comparison, what, claim(comparison, what), y_name, write) for what, claim, y_name, write in charts
    ]
    precision = {"fp32": "single", "bf16": "bfloat16", "fp16": "half"}[comparison.dtype]
    return {
        "setup": (
            "Standard attention is a matrix product, a softmax and a matrix product in plain PyTorch. "
            "SDPA is PyTorch's scaled_dot_product_attention, on the kernel that it chooses. "
            f"Rooftile is rooftile.attention on its own {comparison.backends[OURS]} backend; dispatch prefers PyTorch's kernel on a CPU for "
            "problems without a mask, such as this one. "
            f"All get the same {comparison.batch} × {comparison.heads} heads of {comparison.dim} numbers per token in {precision} "
            "precision, without a mask, so that none gains by skipping tiles."
        ),
        "reach": claims.scaling_claim(comparison) + ".",
        "stops": [f"{claims.NAMES[side][0].upper()}{claims.NAMES[side][1:]}: {reason}." for side, reason in comparison.stopped.items()],
        "charts": [chart for chart in drawn if chart is not None],
        # what has too few lengths for a line is said in words
        "claims": [claim(comparison, what) for (what, claim, *_), chart in zip(charts, drawn, strict=True) if chart is None],
        "method": (
            f"Times are medians of calls taken in turns, after a check against the definition. Memory is measured ({comparison.peak_kind}), "
            "beyond the inputs. Errors are |x − exact| / |exact| against fp64, on sampled rows and heads; the "
            "gradient's is the largest of dq, dk and dv."
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
        "sizes": figures.sizes_table(report, N, element),
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
        "online_note": f"Computed at once, the row has the same sum, {exact:.4f}.",
    }


def _matrix_words(report: Report, matrix: int) -> str:
    """Describes the size of one head's matrix, relative to the cache if that is known and smaller."""
    cache = report.machine.device["l2_bytes"] if report.machine else 0
    words = f"one such matrix takes {size(matrix)} per head"
    if 0 < cache < matrix:
        return f"{words}, {times(matrix / cache)} this machine's L2 cache of {size(cache)}, so the processor waits for memory"
    return f"{words}, and four times as much at twice the length: soon more than any cache"


def _masks(tiling: Tiling) -> dict[str, Any]:
    full = tiling.maps[0]
    maps = []
    for tile_map in tiling.maps:
        is_full = tile_map is full
        saved = f"{tile_map.skipped:,} skipped; {percent(tile_map.saved)} of the scores left out"
        maps.append(
            {
                "name": tile_map.mask,
                "picture": safe(mask_tiles(tile_map, title=tile_map.mask)),
                "counts": f"{len(tile_map.visits):,} tiles computed, {tile_map.masked or 'none'} of them masked, "
                + ("none skipped" if is_full else saved),
                "time": f"forward in {duration(full.forward_us)}" if is_full else claims.tile_time_claim(tile_map, full),
            }
        )
    rows = [
        [
            tile_map.mask, f"{len(tile_map.visits):,}", f"{tile_map.masked:,}", f"{tile_map.skipped:,}", percent(tile_map.saved),
            f"{tile_map.visible_pairs / tile_map.N**2:.1%}", duration(tile_map.forward_us), duration(tile_map.sdpa_us),
        ]
        for tile_map in tiling.maps
    ]  # fmt: skip
    return {
        "claim": claims.tiles_claim(tiling.maps),
        "setup": (
            f"Queries run down, keys across, {full.N:,} of each, in tiles of up to {tiling.block_t} × {tiling.block_s}. Under each mask "
            f"a query sees one interval of keys, so two numbers tell a kernel which tiles to visit. These are the tiles of "
            f"the {tiling.backend} backend, and the time of its forward on this machine, beside SDPA's."
        ),
        "maps": maps,
        "bars": figures.window_bars(tiling),
        "table": Table(["mask", "computed", "masked", "skipped", "left out", "visible pairs", "forward", "SDPA"], rows),
    }  # fmt: skip


def _precision(bits: PrecisionErrors) -> dict[str, Any]:
    return {
        "claim": claims.precision_claim(bits),
        "setup": (
            f"Queries, keys and values of {bits.length:,} tokens, {bits.heads} heads of {bits.dim} numbers, are quantised to 8 bits, and so "
            "are the attention weights. With outliers, one entry in a thousand is ten times as large, and one scale for a whole tensor "
            "is too coarse for the rest. Rotating queries and keys keeps every score and spreads each outlier over its row; one "
            "scale per block, or INT8 for the scores, does the rest. A program only adds rooftile.attention(..., precision=\"fp8\"), "
            "and rooftile accuracy --tensors FILE shows the same for your own tensors."
        ),
        "charts": [figures.loss_bars(bits, distribution) for distribution in bits.losses],
        "note": f"Means over {bits.draws} draws. \"Plain operations\" means that this machine has no kernel for the recipe: the error is valid, the time is not representative.",
    }  # fmt: skip


def _model(training: Training, report: Report) -> dict[str, Any]:
    plan, steps = report.plan.model, len(training.runs[0].losses)
    precision = "single precision" if plan.dtype == "fp32" else f"{plan.dtype} autocast"
    first, last = claims.learning(training.runs[1])
    return {
        "claim": claims.loss_claim(training),
        "setup": (
            f"A Llama of Hugging Face Transformers with {training.parameters:,} random weights learns English from Python's own "
            f"language reference (pydoc_data.topics, {training.text_bytes:,} bytes, one paragraph per line, one token per byte): {steps:,} steps of "
            f"{plan.batch} × {plan.length:,} tokens. It is trained twice, from the same weights on the same batches, in {precision}: once with SDPA, the default of Transformers, and once "
            "with Rooftile behind it."
            + f" The plan was {plan.steps:,} steps; the time limit came first." * (steps < plan.steps)
        ),
        "charts": [figures.loss_chart(training, first, last), *figures.step_charts(training)],
        "written_title": "Then it writes",
        "prompt": training.prompt,
        "written": training.written,
        "written_note": (
            f"{len(training.written)} characters sampled from the model trained with Rooftile, through generate and its KV "
            f"cache. {steps:,} steps teach a small model letters, words and layout, but no meaning."
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


def _not_shown(report: Report) -> str:
    sentences = [
        "One machine, one run, one shape: other head dims, batches and machines give other numbers.",
        "Standard attention is three plain operations here, without torch.compile. To compare other fused kernels, run "
        "rooftile bench attention.",
        "Bytes moved come from a cost model, not from hardware counters.",
        "The Llama is tiny and its training short: the curves show that results do not change, not the speed-up of a large model.",
    ]
    if report.serving:
        sentences.append(
            f"That Llama served {report.serving.plan.requests} requests for short texts, whose lengths were drawn "
            "beforehand: the factors of a large model with many requests differ."
        )
    if report.plan.device == "cpu":
        sentences.append("Nothing here ran on a GPU, and everything ran on one CPU core.")
    sentences.append("The times include the load of other programs, which the top of the page states.")
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
    taken, own = sum(report.seconds.values()), sum(report.cpu_seconds.values())
    of_it = f", of which this process computed for {own:,.0f} s" if own else ""
    return f"{', '.join(words)}. {report.reproduction['date']}. The experiments took {taken:,.0f} s{of_it}."
