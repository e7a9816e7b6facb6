"""Writes the table of docs/how-to/diagnose.md between its markers, `<!-- diagnosis -->`, from the rows of the results.

PYTHONPATH=. python -m rooftile_lab.programs.diagnosis.table            # --check: only whether it is up to date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rooftile_lab.bench.results import Row, latest, read

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "how-to" / "diagnose.md"
FILES = ("h200-diagnosis.jsonl", "cpu-diagnosis.jsonl")
REMEDIES = {"bf16": "narrower-dtype-bf16", "compile": "compile", "CUDA graph": "CUDA-graph"}


def table() -> str:
    """Returns a line for each program: its step, the judged part, and each remedy's predicted and measured part of the step."""
    rows = [row for name in FILES for row in latest(read(ROOT / "benchmarks" / "results" / name))]
    lines = ["| machine | program | step | judged | " + " | ".join(REMEDIES) + " |", "|---" * (4 + len(REMEDIES)) + "|"]
    for row in rows:
        machine = "H200" if "H200" in row.device else "CPU"
        cells = [machine, row.case, f"{row.median_us / 1e3:.3g} ms", f"{row.measures['judged_percent']:.0f} %"]
        lines.append(f"| {' | '.join([*cells, *(saving(row, word) for word in REMEDIES.values())])} |")
    sources = dict.fromkeys(f"{row.device}, torch {row.torch}, {row.date[:10]}, commit {row.commit}." for row in rows)
    return "\n".join([*lines, "", *sources])


def saving(row: Row, word: str) -> str:
    found = [row.measures.get(f"{word}_{kind}_us") for kind in ("predicted", "measured")]
    return "" if None in found else ", ".join(f"{100 * us / row.median_us:.0f} %" for us in found)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    due, count = re.subn(
        r"(<!-- diagnosis -->\n).*?(<!-- /diagnosis -->)", lambda m: f"{m[1]}{table()}\n{m[2]}", text, flags=re.DOTALL
    )
    if count != 1:
        sys.exit(f"{PAGE.name} has {count} places marked diagnosis; needs one")
    if "--check" in sys.argv:
        sys.exit(0 if due == text else f"{PAGE.name}: the table is out of date")
    PAGE.write_text(due, encoding="utf-8")


if __name__ == "__main__":
    main()
