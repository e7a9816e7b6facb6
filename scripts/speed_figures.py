"""Draws the bars of the README and of docs/reference/speed.md from the lines in benchmarks/results.

A bar is the geometric mean of a group of cases, of those that all backends were timed on. All axes begin at zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from rooftile.drawing.svg import svg, text
from rooftile_lab.bench.results import Row, latest, read

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
WIDTH, LEFT, TOP, PANEL, GAP = 880.0, 12.0, 62.0, 190.0, 40.0
ROW = PANEL + 68  # a panel with its title and the names of its groups
LIGHT = """.page { fill: #ffffff } text { font: 13px sans-serif; fill: #1c2430 } .soft { font-size: 12px; fill: #4a5563 }
.title { font-size: 15px; font-weight: 600 } .axis { stroke: #9aa5b1 }
.s0 { fill: #0a64ad } .s1 { fill: #9aa5b1 } .s2 { fill: #d08a2e }"""
DARK = """.page { fill: #0d1117 } text { fill: #e6ebf0 } .soft { fill: #b4bec9 } .axis { stroke: #6b7783 }
.s0 { fill: #4da3ef } .s1 { fill: #6b7783 } .s2 { fill: #d99a45 }"""
THEMES = {
    "light": LIGHT,
    "dark": LIGHT + "\n" + DARK,
    "either": f"{LIGHT}\n@media (prefers-color-scheme: dark) {{ {DARK} }}",
}
PHASES = {"fwd": "Forward", "bwd": "Backward"}
UNITS = {"tflops": "TFLOP/s, more is faster", "ms": "ms, less is faster", "mib": "MiB at peak, less is better"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Bars of some backends from one file of results."""

    title: str
    source: str  # a file in benchmarks/results
    backends: dict[str, str]  # as in the file, and as shown
    panels: tuple[tuple[str, str], ...] = (("fwd", "tflops"), ("bwd", "tflops"))  # phase and quantity
    cases: str = "*"  # a pattern, as in the tables of the page
    by_case: bool = False  # one group per case instead of one per head dim
    across: int = 2  # panels beside each other


FIGURES = {
    "hopper": Figure(
        title="One H200, bf16: geometric mean of 12 cases per head dim (512 to 16,384 tokens, full and causal)",
        source="h200-hopper.jsonl", backends={"hopper": "Rooftile", "torch-cudnn": "cuDNN", "fa4": "FlashAttention-4"},
    ),
    "padded": Figure(
        title="Head dims that are padded: geometric mean of 6 cases (1k, 4k and 16k tokens, full and causal)",
        source="h200-hopper-padded.jsonl", cases="d*l-[14]*k",
        backends={"hopper": "Rooftile", "torch-cudnn": "cuDNN", "fa4": "FlashAttention-4"},
    ),
    "portable": Figure(
        title="The portable backend: geometric mean of 6 cases (1k, 4k and 16k tokens, full and causal)",
        source="h200.jsonl", cases="d*-[14]*k",
        backends={"triton": "Rooftile (triton)", "torch-flash": "PyTorch's FlashAttention-2"},
    ),
    "flex": Figure(
        title="The portable backend and compiled FlexAttention",
        source="h200-flex.jsonl", by_case=True, panels=(("bwd", "tflops"),),
        backends={"triton": "Rooftile (triton)", "flex": "FlexAttention"}, across=1,
    ),
    "standard": Figure(
        title="The portable backend and standard attention, backward",
        source="h200-standard.jsonl", by_case=True, across=1,
        backends={"triton": "Rooftile (triton)", "standard": "standard attention"}, panels=(("bwd", "ms"), ("bwd", "mib")),
    ),
}  # fmt: skip


def groups(rows: list[Row], figure: Figure, phase: str, quantity: str) -> dict[str, list[float]]:
    """Returns the bars of one panel: for each group of cases, a value per backend."""
    values = {(row.case, row.backend): _value(row, quantity) for row in rows if row.phase == phase and row.median_us}
    found: dict[str, list[str]] = {}
    for case in dict.fromkeys(case for case, _ in values):
        if all((case, name) in values for name in figure.backends):
            found.setdefault(case if figure.by_case else _dims(case), []).append(case)
    ordered = sorted(found, key=lambda name: list(map(int, re.findall(r"\d+", name)))) if not figure.by_case else found
    return {group: [_mean([values[case, name] for case in found[group]]) for name in figure.backends] for group in ordered}


def draw(name: str, theme: str = "either") -> str:
    """Returns a figure as SVG, with its own colours: "light", "dark", or "either" as the reader's system says."""
    figure = FIGURES[name]
    rows = [row for row in latest(read(RESULTS / figure.source)) if fnmatch(row.case, figure.cases)]
    shown = [row for row in rows if row.backend in figure.backends and row.phase in {phase for phase, _ in figure.panels}]
    height = TOP + ROW * math.ceil(len(figure.panels) / figure.across) + 22
    parts = [f"<style>{THEMES[theme]}</style>", f'<rect class="page" width="{WIDTH:g}" height="{height:g}"/>']
    parts += [text(LEFT, 22, figure.title, "title", "start"), *_legend(figure)]
    bars = [groups(rows, figure, phase, quantity) for phase, quantity in figure.panels]
    # panels of one quantity share an axis, so that their bars may be compared
    highest = {quantity: 0.0 for _, quantity in figure.panels}
    for (_, quantity), panel in zip(figure.panels, bars, strict=True):
        highest[quantity] = max(highest[quantity], *(value for values in panel.values() for value in values))
    for n, (phase, quantity) in enumerate(figure.panels):
        width = (WIDTH - 2 * LEFT - GAP * (figure.across - 1)) / figure.across
        x, y = LEFT + n % figure.across * (width + GAP), TOP + n // figure.across * ROW
        parts += [text(x, y + 12, f"{PHASES[phase]}, {UNITS[quantity]}", "soft", "start")]
        parts += _panel(bars[n], highest[quantity], x, y + 34, width)
    sources = sorted({f"{row.device}, torch {row.torch}, {row.date[:10]}, commit {row.commit}" for row in shown})
    parts.append(text(LEFT, height - 10, "; ".join(_merged(sources)), "soft", "start"))
    return svg(figure.title, ", ".join(figure.backends.values()), [f"\n{part}" for part in parts], WIDTH, height) + "\n"


def _panel(bars: dict[str, list[float]], highest: float, x: float, y: float, width: float) -> Iterator[str]:
    step = width / len(bars)
    for n, (group, values) in enumerate(bars.items()):
        bar = min(step * 0.86 / len(values), 54.0)
        start = x + step * (n + 0.5) - bar * len(values) / 2
        for k, value in enumerate(values):
            tall = max(value / highest * PANEL, 1.0)
            left = start + k * bar
            yield f'<rect class="s{k}" x="{left + 1:.1f}" y="{y + PANEL - tall:.1f}" width="{bar - 2:.1f}" height="{tall:.1f}"/>'
            yield text(left + bar / 2, y + PANEL - tall - 5, f"{value:,.3g}" if value < 10 else f"{value:,.0f}", "soft", "middle")
        yield text(x + step * (n + 0.5), y + PANEL + 18, group, "", "middle")
    yield f'<path class="axis" d="M {x:g} {y + PANEL:g} h {width:g}"/>'


def _legend(figure: Figure) -> Iterator[str]:
    x = LEFT
    for n, name in enumerate(figure.backends.values()):
        yield f'<rect class="s{n}" x="{x:g}" y="34" width="13" height="13"/>'
        yield text(x + 19, 45, name, "", "start")
        x += 42 + 7.6 * len(name)


def _value(row: Row, quantity: str) -> float:
    found = {"tflops": row.tflops, "ms": (row.median_us or 0) / 1e3, "mib": (row.peak_bytes or 0) / 2**20}[quantity]
    assert found, f"{row.case} on {row.backend} has no {quantity}"
    return found


def _mean(values: list[float]) -> float:
    """Returns the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _dims(case: str) -> str:
    """Names a case's head dims: "D 64", or "D 192, values 128"."""
    found = re.match(r"d(\d+)(?:-(\d+))?-(?:full|causal)", case)
    assert found, f"{case} names no head dim"
    return f"D {found[1]}" + (f", values {found[2]}" if found[2] else "")


def _merged(sources: list[str]) -> list[str]:
    """Joins the commits of sources that are otherwise the same."""
    commits: dict[str, list[str]] = {}
    for source in sources:
        run, commit = source.rsplit(", commit ", 1)
        commits.setdefault(run, []).append(commit)
    return [f"{run}, commit{'s' * (len(found) > 1)} {', '.join(found)}" for run, found in commits.items()]
