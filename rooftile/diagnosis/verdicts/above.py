"""Operators that seem faster than a roof allows, and why they may be."""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.diagnosis.verdicts.findings import Finding
from rooftile.hardware import load
from rooftile.hardware.ceilings import Ceilings

# a rate this far above its roof needs a reason: the roof was measured too low, or the count is not what was done
ABOVE = 1.05
# shorter operators are left out: their times are as uncertain
LEAST_US = 1e3


def is_above(finding: Finding) -> bool:
    """Returns whether an operator that takes a while is faster than a roof that it cannot pass."""
    share = finding.verdict.model.roof_share
    return finding.time_us > LEAST_US and share is not None and share > ABOVE


def why_above(findings: Sequence[Finding], ceilings: Ceilings) -> list[str]:
    """Returns a note about the rows above their roofs, with the reasons that may explain each unit."""
    units: dict[str, list[Finding]] = {}
    for finding in filter(is_above, findings):
        units.setdefault(finding.verdict.model.roof or "", []).append(finding)
    return [_note(unit, rows, ceilings) for unit, rows in units.items()]


def _note(unit: str, rows: Sequence[Finding], ceilings: Ceilings) -> str:
    names = ", ".join(dict.fromkeys(row.operation.op.removeprefix("aten::") for row in rows))
    most = max(row.verdict.model.roof_share or 0.0 for row in rows)
    reasons = []
    if any("conv" in row.operation.op for row in rows):
        reasons.append("a convolution by Winograd's algorithm or by FFT needs fewer FLOPs than are counted")
    if unit in ("DRAM", "HBM"):
        reasons.append("a part of their data was still in the cache")
    busy = max(ceilings.busy_cores.values(), default=0.0)
    if busy >= load.QUIET * load.cores():
        reasons.append(f"the roof was measured while {load.words(busy)}")
    if not reasons:
        reasons.append("the roof was measured on other sizes, or at a lower clock")
    return f"{names} seem to reach {100 * most:.0f} % of the {unit} roof, which no operator can pass: {'; or '.join(reasons)}"
