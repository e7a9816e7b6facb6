"""Writes the SVG figures of the pages: the schedule of the Hopper forward, a paged KV cache, what bounds a program,
the bars of measured speed, the studies of states, context, experts and user histories, and what drafts are predicted to gain.

The figures carry their own colours, for light and for dark pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import draft_figure
import speed_figures
import study_figures
from speed_figures import RESULTS

from rooftile.drawing.svg import svg, text
from rooftile_lab.bench.results import latest, read

FOLDER = Path(__file__).resolve().parent.parent / "docs"
STYLE = """<style>
text { font: 13px sans-serif; fill: #1c2430 } .small { font-size: 11.5px; fill: #4a5563 } .inside { fill: #ffffff }
.page { fill: #ffffff } .track { fill: #eef1f5 } .free { fill: #eef1f5; stroke: #9aa5b1 } .arrow { stroke: #4a5563; fill: none }
.strong { font-weight: 600 } .memory, .compute { fill: none; stroke-width: 3.5; stroke-linecap: round }
.memory { stroke: #2f6fab } .compute { stroke: #b0501a } .dotted { fill: none; stroke: #6b7783; stroke-dasharray: 2 4 }
.a { fill: #2f6fab } .b { fill: #a8641a } .both { fill: #2c7a4b } .copy { fill: #5f6b7a }
@media (prefers-color-scheme: dark) {
  text { fill: #e6ebf0 } .small { fill: #b4bec9 } .inside { fill: #ffffff } .page { fill: #12181f } .track { fill: #1f2832 }
  .memory { stroke: #5fa8e8 } .compute { stroke: #e8925c }
  .free { fill: #1f2832; stroke: #6b7783 } .arrow { stroke: #b4bec9 }
}
</style>"""


def box(x: float, y: float, width: float, height: float, kind: str, words: str = "") -> str:
    """A rectangle with words in its middle."""
    rect = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"/>'
    return rect + (text(x + width / 2, y + height / 2 + 4.5, words, "inside", "middle") if words else "")


def figure(title: str, what: str, parts: list[str], width: float, height: float) -> str:
    page = f'<rect class="page" width="{width:g}" height="{height:g}"/>'
    return svg(title, what, [f"\n{STYLE}\n", page, *(f"\n{part}" for part in parts), "\n"], width, height) + "\n"


def schedule() -> str:
    """The steady state of the Hopper forward: one row per unit of hardware, time to the right."""
    left, unit, row, gap = 168.0, 44.0, 26.0, 6.0
    groups = [f"warpgroup {n}: {what}" for n in (1, 2) for what in ("products", "softmax")]
    rows = ["loader warp: copies (TMA)", *groups]
    tops = [34 + n * (row + gap) + (8 if n > 0 else 0) + (8 if n > 2 else 0) for n in range(len(rows))]
    parts = [text(left, 20, "time →", "small", "start")]
    for name, top in zip(rows, tops, strict=True):
        parts += [text(left - 10, top + 17.5, name, "small", "end"), box(left, top, 12 * unit, row, "track")]

    def work(n: int, start: float, units: float, kind: str, words: str) -> None:
        parts.append(box(left + start * unit + 1, tops[n], units * unit - 2, row, kind, words))

    # a period of four units: both products of one warpgroup, then both of the other
    for n in range(3):
        start, j = 4 * n, n + 1
        work(0, start, 2, "copy", f"K{_low(j + 2)}")
        work(0, start + 2, 2, "copy", f"V{_low(j + 1)}")
        work(1, start, 1, "a", f"QK{_low(j + 1)}")
        work(1, start + 1, 1, "a", f"P{_low(j)}V{_low(j)}")
        work(2, start + 1, 2, "a", f"softmax {j + 1}")
        work(3, start + 2, 1, "b", f"QK{_low(j + 1)}")
        work(3, start + 3, 1, "b", f"P{_low(j)}V{_low(j)}")
        if n < 2:
            work(4, start + 3, 2, "b", f"softmax {j + 1}")
    work(4, 0, 1, "b", "…")
    work(4, 11, 1, "b", "…")
    return figure(
        "How the Hopper forward overlaps copies, matrix products and softmax",
        "copies run ahead; while one warpgroup is in its softmax, the tensor cores multiply for the other",
        parts, left + 12 * unit + 16, tops[-1] + row + 16,
    )  # fmt: skip


def paged_cache() -> str:
    """Two sequences that share a prompt: their block tables, and the blocks in memory."""
    tables = {"a": ("sample 1", (4, 0, 6)), "b": ("sample 2", (4, 0, 3))}
    owners = {4: "both", 0: "both", 6: "a", 3: "b"}
    words = {4: "tokens 0–15", 0: "tokens 16–31", 6: "tokens 32–40", 3: "tokens 32–38"}
    filled = {4: 1.0, 0: 1.0, 6: 9 / 16, 3: 7 / 16}
    return figure(
        "A paged KV cache",
        "two samples of one prompt name the same two full blocks, and each has a last block of its own",
        [*_memory(owners, words, filled), *_tables(tables, owners)], 640, 300,
    )  # fmt: skip


def _memory(owners: dict[int, str], words: dict[int, str], filled: dict[int, float]) -> Iterator[str]:
    yield text(400, 24, "blocks of 16 tokens in GPU memory", "small", "start")
    for n in range(8):
        y = 34 + 32 * n
        yield text(392, y + 18, f"{n}", "small", "end")
        yield box(400, y, 220, 27, "free")
        if n in owners:
            yield box(400, y, 220 * filled[n], 27, owners[n])
            yield text(406, y + 18, words[n], "inside", "start")
        else:
            yield text(406, y + 18, "free", "small", "start")


def _tables(tables: dict[str, tuple[str, tuple[int, ...]]], owners: dict[int, str]) -> Iterator[str]:
    for (name, blocks), top in zip(tables.values(), (44.0, 176.0), strict=True):
        yield text(20, top - 8, f"block table of {name}", "small", "start")
        for n, block in enumerate(blocks):
            y = top + 28 * n
            yield box(20, y, 64, 24, owners[block], f"{block}")
            start, end = y + 12, 47.5 + 32 * block
            yield f'<path class="arrow" d="M 86 {start:g} C 200 {start:g} 260 {end:g} 376 {end:g}"/>'


def three_regimes() -> str:
    """The time of one pass over memory, by its arithmetic: overhead below, then memory, then compute."""
    left, bottom, top, knee, right = 70.0, 226.0, 40.0, 330.0, 610.0
    flat, floor = 150.0, 206.0
    parts = [
        f'<path class="arrow" d="M {left:g} {top - 10:g} V {bottom:g} H {right + 6:g}"/>',
        text(left - 8, top - 2, "time", "small", "end"),
        text(right, bottom + 20, "arithmetic per byte →", "small", "end"),
        f'<path class="dotted" d="M {left:g} {floor:g} H {right:g}"/>',
        text(right, floor - 6, "the call itself: overhead", "small", "end"),
        f'<path class="memory" d="M {left:g} {flat:g} H {knee:g}"/>',
        f'<path class="compute" d="M {knee:g} {flat:g} L {right - 40:g} {top:g}"/>',
        f'<path class="dotted" d="M {knee:g} {top + 20:g} V {bottom:g}"/>',
        text(knee, bottom + 16, "knee", "small", "middle"),
        text((left + knee) / 2, flat - 26, "memory: the time stays", "strong", "middle"),
        text((left + knee) / 2, flat - 10, "more arithmetic is free", "small", "middle"),
        text(knee + 96, flat - 6, "compute: the time rises", "strong", "start"),
        text(knee + 96, flat + 10, "fewer bytes would not help", "small", "start"),
    ]
    return figure(
        "The time of an operation as its arithmetic grows and its bytes stay",
        "flat while memory bounds it, rising after the knee, and never below the cost of the call", parts, 640, 260,
    )  # fmt: skip


def _low(n: int) -> str:
    """n as a subscript."""
    return str(n).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


def trained_formats() -> str:
    """The loss that a format costs a small Llama: rounded after training, and trained with the rounding."""
    names = {
        "int4-32": "INT4, 32 weights share a scale", "int4-row": "INT4, a row shares a scale", "mxfp4": "MXFP4 weights",
        "mxfp4-mxfp4": "MXFP4 weights and activations",
    }  # fmt: skip
    rows = {row.case: row.measures for row in latest(read(RESULTS / "cpu-qat.jsonl"))}
    left, row, full = 238.0, 62.0, 430.0
    above = {
        name: [rows[name][f"{kind}_nats"] - rows[name]["continued_nats"] for kind in ("rounded", "trained")] for name in names
    }  # fmt: skip
    unit = full / max(max(values) for values in above.values())
    parts = [text(16, 26, "Loss above full precision, nats a byte: less is better", "strong", "start")]
    for n, (kind, words) in enumerate((("b", "rounded after training"), ("both", "trained with the rounding"))):
        parts += [box(left + 200 * n, 40, 12, 12, kind), text(left + 200 * n + 18, 51, words, "small", "start")]
    for n, (name, words) in enumerate(names.items()):
        top = 66 + n * row
        parts.append(text(left - 12, top + 27, words, "small", "end"))
        for m, (kind, value) in enumerate(zip(("b", "both"), above[name], strict=True)):
            parts.append(box(left, top + 23 * m, value * unit, 20, kind))
            parts.append(text(left + value * unit + 6, top + 23 * m + 15, f"{value:.4f}", "small", "start"))
    what = "Bars of four formats: training with the rounding wins back most of what rounding costs."
    return figure("What training for a format wins back", what, parts, left + full + 64, 66 + len(names) * row)


def split_sequence() -> str:
    """Four ranks: the tokens that each holds, and what each method sends to whom."""
    kinds, cell, row, left = ("a", "b", "both", "copy"), 26.0, 26.0, 70.0
    owner = [min(n, 7 - n) for n in range(8)]
    width = 8 * cell
    columns = [left, left + width + 34, left + 2 * width + 68]
    heads = ("gather: keys that a rank sees", "ulysses: some heads, all tokens", "ring: whose keys, step by step")
    parts = [text(left, 20, "tokens of the sequence, in eighths; a colour is the rank that holds them", "strong", "start")]
    parts += [box(left + n * cell + 1, 30, cell - 2, row - 4, kinds[owner[n]], str(n)) for n in range(8)]
    for x, words in zip(columns, heads, strict=True):
        parts.append(text(x, 84, words, "strong", "start"))
    for rank in range(4):
        top = 94 + rank * (row + 6)
        parts.append(text(left - 10, top + 17, f"rank {rank}", "small", "end"))
        for n in range(8):
            x, kind = n * cell + 1, kinds[owner[n]]
            # a causal mask: a rank sees what is before its last eighth
            sees = n <= 7 - rank
            parts.append(box(columns[0] + x, top, cell - 2, row, kind if sees else "free", str(n) if sees else ""))
            for head in range(4):
                parts.append(box(columns[1] + x, top + 7 * head, cell - 2, 5, kind if head == rank else "track"))
        for step in range(4):
            other = (rank - step) % 4
            parts.append(box(columns[2] + 2 * step * cell + 1, top, 2 * cell - 2, row, kinds[other], f"rank {other}"))
    return figure(
        "Who holds which tokens, and who sends what",
        "gather fetches keys, ulysses exchanges tokens for heads, and the ring passes keys on", parts,
        columns[2] + width + 16, 232,
    )  # fmt: skip


FIGURES: dict[str, Callable[[], str]] = {
    "concepts/asynchrony.svg": schedule,
    "concepts/paging.svg": paged_cache,
    "concepts/splitting-a-sequence.svg": split_sequence,
    "concepts/what-bounds-a-program.svg": three_regimes,
    "figures/formats.svg": trained_formats,
    "figures/states.svg": partial(study_figures.states, RESULTS),
    "figures/context.svg": partial(study_figures.contexts, RESULTS),
    "figures/loads.svg": partial(study_figures.loads, RESULTS),
    "figures/drafts.svg": draft_figure.gains,
    "figures/histories.svg": partial(study_figures.histories, RESULTS),
    # the README chooses by GitHub's setting, which may differ from the system's
    "figures/speed-light.svg": partial(speed_figures.draw, "hopper", "light"),
    "figures/speed-dark.svg": partial(speed_figures.draw, "hopper", "dark"),
    **{f"figures/{name}.svg": partial(speed_figures.draw, name) for name in speed_figures.FIGURES},
}

if __name__ == "__main__":
    for file, draw in FIGURES.items():
        due = draw()
        if "--check" in sys.argv:
            if (FOLDER / file).read_text(encoding="utf-8") != due:
                sys.exit(f"docs/{file} is out of date")
        else:
            (FOLDER / file).parent.mkdir(exist_ok=True)
            (FOLDER / file).write_text(due, encoding="utf-8")
            print(f"wrote docs/{file}")
