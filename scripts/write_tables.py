"""Writes tables between their markers, in docs/reference: backends.md, approximate.md, diagnosis-truth.md, in docs/how-to:
choose-a-method.md, diagnose.md.

The backends' own refusals make the table of features: a cell is "yes" if the backend refuses nothing. The table of methods is
`rooftile.approximate.METHODS`. Crossovers come from the rows of `rooftile bench approximate --crossover` in benchmarks/results/,
diagnoses from the rows of `rooftile bench diagnosis` there.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import torch
from agreement import agreement
from crossovers import crossovers

from rooftile import CAUSAL, Chunk, Prefix, Window
from rooftile.approximate import METHODS
from rooftile.exact import dispatch
from rooftile.exact.spec import Spec
from rooftile_lab.bench import results
from rooftile_lab.bench.diagnosis.cases import CASES

ROOT = Path(__file__).resolve().parent.parent

# a column is a backend on one kind of device
COLUMNS = (
    ("hopper", "sm90", "hopper (H100, H200)"),
    ("triton", "sm90", "triton (GPU)"),
    ("sdpa", "sm90", "sdpa (GPU)"),
    ("sdpa", "cpu", "sdpa (CPU)"),
    ("tiled", "cpu", "tiled (CPU)"),
    ("eager", "cpu", "eager"),
)
PLAIN = {"dtype": torch.bfloat16, "dim": 64, "dim_v": 64, "scale": 0.125}
FEATURES: tuple[tuple[str, dict[str, object]], ...] = (
    ("bf16", {}),
    ("fp16", {"dtype": torch.float16}),
    ("fp32", {"dtype": torch.float32}),
    ("fp64", {"dtype": torch.float64}),
    ("head dim 80", {"dim": 80, "dim_v": 80}),
    ("head dim 256", {"dim": 256, "dim_v": 256}),
    ("head dim 192, values 128", {"dim": 192, "dim_v": 128}),
    ("grouped heads (GQA, MQA)", {"group": 4}),
    ("`CAUSAL`", {"mask": CAUSAL}),
    ("`Window`", {"mask": CAUSAL & Window(1024)}),
    ("`Prefix`", {"mask": Prefix(16)}),
    ("`Chunk`", {"mask": Chunk(64)}),
    ("packed sequences", {"layout": "packed"}),
    ("paged KV cache: decode", {"layout": "paged", "queries": "one"}),
    ("paged KV cache: prefill", {"layout": "paged", "queries": "many"}),
    ("`softcap`", {"softcap": 30.0}),
    ("`bias`", {"has_bias": True}),
    ("`alibi`", {"has_alibi": True}),
    ("`sinks`", {"has_sinks": True}),
    ("`dropout`", {"dropout": 0.1}),
    ("`blocks`", {"block_size": (128, 128)}),
    ("`blocks`, gradients", {"block_size": (128, 128), "needs_grad": True}),
    ("lse", {"needs_lse": True}),
    ("gradients", {"needs_grad": True}),
    ("gradient of `bias`", {"has_bias": True, "needs_grad": True, "bias_grad": True}),
    ("gradient through lse", {"needs_lse": True, "needs_grad": True}),
    ("`deterministic` gradients", {"needs_grad": True, "deterministic": True}),
    ("forward-mode and second derivatives", {"forward_mode": True}),
)


def features() -> str:
    """Returns the table of features x backends in Markdown."""
    lines = ["| | " + " | ".join(title for _, _, title in COLUMNS) + " |", "|---|" + ":-:|" * len(COLUMNS)]
    for words, what in FEATURES:
        cells = []
        for name, device, _ in COLUMNS:
            spec = replace(Spec(**PLAIN), device=device, **what)
            cells.append("yes" if next(dispatch.BACKENDS[name].refusals(spec), None) is None else "–")
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def methods() -> str:
    """Returns the table of approximate methods in Markdown."""
    lines = ["| method | no output depends on | takes | paper |", "|---|---|---|---|"]
    words = {"value-causal": "values of later tokens", "strict": "anything of later tokens"}
    for name, method in METHODS.items():
        kept = []
        for mode, classes in method.causality.items():
            strongest = next((words[each] for each in ("strict", "value-causal") if each in classes), "–")
            kept.append(f"`{mode}`: {strongest}" + "; token by token it is the same" * ("decodable" in classes))
        takes = ", ".join(sorted(method.takes))
        paper = f"{method.title}, [{method.arxiv}](https://arxiv.org/abs/{method.arxiv})"
        lines.append(f"| `{name}` | {'<br>'.join(kept)} | {takes} | {paper} |")
    return "\n".join(lines)


def paying() -> str:
    """Returns the crossovers of the committed rows in Markdown."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*-approximate.jsonl"))
    return crossovers(row for file in files for row in results.read(file))


REMEDIES = {"bf16": "narrower-dtype-bf16", "compile": "compile", "CUDA graph": "CUDA-graph"}


def diagnosed() -> list[results.Row]:
    """Returns the committed rows of `rooftile bench diagnosis`, the last of each case on each machine."""
    files = [ROOT / "benchmarks" / "results" / name for name in ("h200-diagnosis.jsonl", "cpu-diagnosis.jsonl")]
    return [row for file in files for row in results.latest(results.read(file))]


def diagnoses() -> str:
    """Returns a line for each program: its step, the judged part, and each remedy's predicted and measured part of the step."""
    rows = [row for row in diagnosed() if row.case not in CASES]
    lines = ["| machine | program | step | judged | " + " | ".join(REMEDIES) + " |", "|---" * (4 + len(REMEDIES)) + "|"]
    for row in rows:
        machine = "H200" if "H200" in row.device else "CPU"
        cells = [machine, row.case, f"{row.median_us / 1e3:.3g} ms", f"{row.measures['judged_percent']:.0f} %"]
        lines.append(f"| {' | '.join([*cells, *(saving(row, word) for word in REMEDIES.values())])} |")
    return "\n".join([*lines, "", *results.sources(rows)])


def saving(row: results.Row, word: str) -> str:
    """Returns the predicted and the measured saving of a remedy, as parts of the step."""
    found = [row.measures.get(f"{word}_{kind}_us") for kind in ("predicted", "measured")]
    return "" if None in found else ", ".join(f"{100 * us / row.median_us:.0f} %" for us in found)


def written(page: str, name: str, body: str) -> str:
    """Returns the page with the text between the markers of `name` replaced by `body`."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    found, count = re.subn(pattern, lambda m: f"{m[1]}{body}\n{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{page} has {count} places marked {name}; needs one")
    return found


if __name__ == "__main__":
    tables = (
        ("reference/backends.md", "features", features()),
        ("reference/approximate.md", "methods", methods()),
        ("how-to/choose-a-method.md", "crossovers", paying()),
        ("how-to/diagnose.md", "diagnosis", diagnoses()),
        ("reference/diagnosis-truth.md", "agreement", agreement(diagnosed())),
    )
    for page, name, body in tables:
        due = written(page, name, body)
        if "--check" in sys.argv:
            if (ROOT / "docs" / page).read_text(encoding="utf-8") != due:
                sys.exit(f"{page}: the table of {name} is out of date")
        else:
            (ROOT / "docs" / page).write_text(due, encoding="utf-8")
            print(f"wrote the table of {name} in {page}")
