"""Writes the numbers of the README and of the first page of the docs between their markers, from lines in benchmarks/results/.

A marker is `<!-- measured: NAME -->`; each number stands with the card on which it was measured. With --check: only whether the
pages are up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from textwrap import fill

from rooftile.approximate.methods import METHODS
from rooftile_lab.bench.results import Row, latest, read

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
MARKED = re.compile(r"(<!-- measured: (\w+) -->\n).*?(\n *<!-- /measured -->)", re.DOTALL)


def rows(name: str) -> list[Row]:
    """Returns the last rows of a file of results."""
    return latest(read(ROOT / "benchmarks" / "results" / f"{name}.jsonl"))


def row(name: str, case: str, backend: str, phase: str) -> Row:
    """Returns one row of a file of results."""
    (found,) = [one for one in rows(name) if (one.case, one.backend, one.phase) == (case, backend, phase)]
    return found


def card(*found: Row) -> str:
    """Returns the name of the card on which all of some rows were measured, as "H200"."""
    (name,) = {one.device.removeprefix("NVIDIA ").split(" ")[0] for one in found}
    return name


def us(found: Row) -> float:
    """Returns the median time of a row that was timed."""
    assert found.median_us is not None, f"{found!r} was not timed"
    return found.median_us


def entrance() -> str:
    """Says what the library is for, with a number for each part."""
    ours, cudnn = (row("h200-hopper", "d128-causal-16k", name, "fwd") for name in ("hopper", "torch-cudnn"))
    judged = [one for one in rows("h200-diagnosis") if "judged_percent" in one.measures]
    fused = row("h200-training", "llama-1b-8x4k", "fused", "step")
    served = row("h200-engine", "W1-1b", "rooftile", "serve")
    linear, exact = (row("h200-approximate", "linear-16k", name, "fwd") for name in ("rooftile", "exact"))
    experts, grouped = (row("h200-experts", "layer-4096", name, "fwd+bwd") for name in ("rooftile", "grouped-mm"))
    where = card(ours, cudnn, *judged, fused, served, linear, exact, experts, grouped)
    share = median(one.measures["judged_percent"] for one in judged)
    times, tokens = fused.measures["of_sdpa_ratio"], served.measures["output_tok_s"]
    parts = {
        "**exact attention**": f"a causal forward of 16k tokens runs at {ours.tflops:.0f} TFLOP/s, "
        f"{us(cudnn) / us(ours):.2f} times cuDNN's speed",
        "**recurrences and experts** (Mamba, gated delta nets, DeepSeekMoE), trained and served": "a layer of 64 experts trains "
        f"{us(grouped) / us(experts):.2f} times as fast as with PyTorch's grouped product",
        "**diagnosis**": f"experiments say what bounds a program, for {share:.0f} % of its time (the median of {len(judged)} "
        "programs)",
        "**training** in 16 bits or for number formats": f"a 1B Llama trains {times:.2f} times as fast as with PyTorch's SDPA",
        "**serving** from a paged KV cache": f"{tokens:,.0f} tokens per second from a 1B Llama",
        f"**approximate attention** by {len(METHODS)} methods": "linear attention's forward of 16k tokens takes "
        f"{us(linear) / us(exact):.2f} of exact attention's time",
    }
    head = f"Rooftile is a PyTorch library on GPUs and CPUs (the numbers are from an {where}) for"
    return f"{head}\n\n" + ";\n".join(f"- {what}: {number}" for what, number in parts.items()) + "."


def fp8() -> str:
    """Compares FP8 attention with the fastest 16-bit kernel."""
    found = [row("h200-precision", f"d128-{mask}-16k", "fp8", "fwd") for mask in ("full", "causal")]
    full, causal = (one.measures["of_best_16_bit_ratio"] for one in found)
    words = (
        f"At 16k keys and D = 128 on an {card(*found)}, FP8 including quantisation is {full:.2f}x the fastest 16-bit kernel "
        f"of ours, and {causal:.2f}x under a causal mask; short sequences are slower ([how](docs/how-to/fp8-and-int8.md))."
    )
    return fill(words, 130, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def formats() -> str:
    """Returns the table of a model that is served in three formats."""
    weights = {"bf16": "", "FP8": "-fp8-weights", "INT4": "-int4:128-weights"}
    cases = (
        ("tokens per second, 256 requests at once", "W1-8b", "serve", lambda one: f"{one.measures['output_tok_s']:,.0f}"),
        ("tokens per second, one request", "W10-8b", "serve", lambda one: f"{one.measures['output_tok_s']:,.0f}"),
        ("milliseconds of a decode step of 256", "decode-step-256x640-8b", "decode", lambda one: f"{us(one) / 1e3:.1f}"),
    )
    lines, seen = [], []
    for words, case, phase, write in cases:
        found = [row("h100-engine", f"{case}{suffix}", "rooftile", phase) for suffix in weights.values()]
        seen += found
        lines.append(f"| {words} | {' | '.join(map(write, found))} |")
    return "\n".join([f"| an 8B model on an {card(*seen)} | {' | '.join(weights)} |", "|---|--:|--:|--:|", *lines])


WRITERS: dict[str, Callable[[], str]] = {"entrance": entrance, "fp8": fp8, "formats": formats}


def main() -> None:
    """Writes the pages, or says which is out of date."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        due, count = MARKED.subn(lambda found: f"{found[1]}{WRITERS[found[2]]()}{found[3]}", text)
        if not count:
            sys.exit(f"{page.name} has no place marked `measured`")
        if "--check" in sys.argv and due != text:
            sys.exit(f"{page.name}: its numbers are out of date")
        if "--check" not in sys.argv:
            page.write_text(due, encoding="utf-8")


if __name__ == "__main__":
    main()
