"""Writes into the package how well computed prices of compile agreed with the recorded benchmarks of the diagnosis."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rooftile.diagnosis.remedies import recorded
from rooftile.diagnosis.remedies.observed_step import WORTH
from rooftile.diagnosis.remedies.recorded import FACTOR, RecordedPrices

RESULTS = Path(__file__).parents[1] / "benchmarks/results"


def compared(rows: Iterable[dict[str, Any]]) -> RecordedPrices:
    """Returns the comparison for the last row of each program that tried it; a price that is too small to be shown is none."""
    last = {row["case"]: row for row in rows if "compile_measured_us" in row["measures"]}
    pairs = [
        (row["measures"]["compile_predicted_us"], row["measures"]["compile_measured_us"]) for row in last.values()
        if row["measures"].get("compile_predicted_us", 0.0) >= WORTH * row["median_us"]
    ]  # fmt: skip
    return RecordedPrices(len(pairs), sum(saved > 0 and 1 / FACTOR <= price / saved <= FACTOR for price, saved in pairs))


def read() -> dict[str, RecordedPrices]:
    """Returns the comparisons by kind of device."""
    rows = [json.loads(line) for path in sorted(RESULTS.glob("*-diagnosis.jsonl")) for line in path.read_text().splitlines()]
    on_cpu = [row for row in rows if row["arch"] == "cpu"]
    return {"cpu": compared(on_cpu), "cuda": compared(row for row in rows if row["arch"] != "cpu")}


if __name__ == "__main__":
    path = Path(recorded.__file__)
    lines = "".join(
        f'    "{device}": RecordedPrices(programs={found.programs}, within={found.within}),\n' for device, found in read().items()
    )
    path.write_text(re.sub(r"(?<=COMPILE = \{\n).*?(?=\})", lines, path.read_text(), flags=re.DOTALL))
