"""Writes docs/concepts/ladder.md and its figure from the committed results of `rooftile bench ladder` and `ladder-counters`."""

from __future__ import annotations

from html import escape
from pathlib import Path

from rooftile_lab.bench import results
from rooftile_lab.bench.ladder import RUNGS
from rooftile_lab.bench.results import Row

ROOT = Path(__file__).resolve().parent.parent
TIMES = ROOT / "benchmarks/results/h200-ladder.jsonl"
COUNTERS = ROOT / "benchmarks/results/h200-ladder-counters.jsonl"
PAGE = ROOT / "docs/concepts/ladder.md"
FIGURE = ROOT / "docs/concepts/ladder.svg"

# each rung, and its limit by the counters
RUNG = {
    "standard": (
        "standard attention, with the matrices of scores and weights in memory",
        "memory traffic: these matrices are written and read back",
    ),
    "flash-1": (
        "FlashAttention-1: tiles and online softmax, keys and values in the outer loop, one program per head",
        "64 programs for 132 multiprocessors, and each waits for its output, maximum and sum, which are in memory",
    ),
    "flash-2": (
        "FlashAttention-2: one program per tile of queries, the output in registers (the `triton` backend)",
        "softmax and matrix products wait for each other",
    ),
    "plain": (
        "copies by TMA, one block ahead; all warps do all work in turn",
        "as before; eight warps wait for the same data at the same time",
    ),
    "specialised": (
        "a loader warp and two consumer warpgroups",
        "within a warpgroup, softmax and products still alternate",
    ),
    "overlapped": (
        "a block's softmax runs under the matrix product of the block before",
        "the tensor cores, in use for three quarters of the cycles; starts and ends of tiles",
    ),
    "ping-pong": (
        "the two warpgroups issue in turns",
        "the same; the turns cost a little here",
    ),
    "hopper": (
        "persistent programs that draw work tiles, longest first, and overlap the end of a tile with the start of the next; "
        "queries in registers; lazy rescaling (the `hopper` backend)",
        "the tensor cores, in use for four fifths of the cycles",
    ),
}

HEAD = """# A ladder, from standard attention to the Hopper kernel

Each rung computes the same forward with one technique more than the rung above it: bf16, head dim 128, 16 heads, 4 sequences of
4,096. The rungs from *plain* to *ping-pong* are small, readable kernels in `rooftile_lab/bench/ladder/kernels.py`.

![TFLOP/s of each rung](ladder.svg)

"""

FOOT = """
- *of the ceiling*: relative to the TFLOP/s of a plain matrix product in the same run.
- *tensor cores*, *exponentials*, *issue*: the fraction of cycles in which the tensor cores, the unit for exponentials and the
  instruction schedulers were in use. *memory*, *L2*: the fraction of their peak throughput. All are the chip's counters (Nsight
  Compute), for the full mask.

The technique of each rung, and its limit according to the counters:

"""

LAST = """
Written by `scripts/write_ladder.py` from lines that `rooftile bench ladder` and `rooftile bench ladder-counters` measured. A rung
that is not among them is not in the table.
"""


def read(path: Path) -> dict[tuple[str, str], Row]:
    """The last row of each (rung, mask)."""
    return {(row.backend, row.case.split("-")[1]): row for row in results.read(path)}


def page(times: dict[tuple[str, str], Row], counters: dict[tuple[str, str], Row]) -> str:
    there = [rung for rung in RUNGS if (rung, "full") in times]
    lines = [
        "| rung | full, µs | TFLOP/s | of the ceiling | causal, µs | TFLOP/s "
        "| tensor cores | exponentials | issue | memory | L2 | DRAM, MB |",
        "|---|" + "--:|" * 11,
    ]
    for rung in there:
        full, causal, found = times[rung, "full"], times[rung, "causal"], counters[rung, "full"]
        shares = (f"{found.measures[f'{name}_percent']:.0f} %" for name in ("tensor", "exp", "issue", "dram", "l2"))
        cells = (
            rung, f"{full.median_us:,.0f}", f"{full.tflops:.0f}", f"{100 * full.tflops / full.matmul_tflops:.0f} %",
            f"{causal.median_us:,.0f}", f"{causal.tflops:.0f}", *shares, f"{found.measures['dram_mb']:,.0f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    sources = {
        f"{what}: {row.device}, {row.date[:10]}, commit {row.commit}"
        for what, rows in (("Times", times), ("Counters", counters))
        for (rung, _), row in rows.items()
        if rung in there
    }
    limits = [f"- **{rung}**: {RUNG[rung][0]}. Limit: {RUNG[rung][1]}." for rung in there]
    lines += ["", " ".join(f"{source}." for source in sorted(sources, reverse=True))]
    return HEAD + "\n".join(lines) + "\n" + FOOT + "\n".join(limits) + "\n" + LAST


def figure(times: dict[tuple[str, str], Row]) -> str:
    """Bars for each rung: full above causal, and the ceiling as a line."""
    there = [rung for rung in RUNGS if (rung, "full") in times]
    ceiling = times[there[0], "full"].matmul_tflops
    left, width, step, top = 110, 560, 46, 34
    scale = width / ceiling
    height = top + step * len(there) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" font-family="sans-serif" font-size="13">',
        "<title>TFLOP/s of each rung of the ladder</title>",
        f'<rect width="760" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="18" fill="#1f4e79">full</text><text x="{left + 40}" y="18" fill="#7a4a00">causal</text>',
        f'<text x="{left + width}" y="18" fill="#555555" text-anchor="end">matrix product: {ceiling:.0f} TFLOP/s</text>',
        f'<path d="M {left + width} {top - 8} V {height - 8}" stroke="#888888" stroke-dasharray="4 3"/>',
    ]
    for n, rung in enumerate(there):
        y = top + step * n
        parts.append(f'<text x="{left - 8}" y="{y + 22}" fill="#222222" text-anchor="end">{escape(rung)}</text>')
        for mask, color, down in (("full", "#2f6fab", 0), ("causal", "#d08a2e", 18)):
            tflops = times[rung, mask].tflops
            length = round(tflops * scale, 1)
            parts.append(f'<rect x="{left}" y="{y + down}" width="{length}" height="15" rx="2" fill="{color}"/>')
            parts.append(f'<text x="{left + length + 6}" y="{y + down + 12}" fill="#222222">{tflops:.0f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    times = read(TIMES)
    PAGE.write_text(page(times, read(COUNTERS)))
    FIGURE.write_text(figure(times))


if __name__ == "__main__":
    main()
