"""The prices of storing something for the backward, and of computing it again."""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.diagnosis.records import StepCall
from rooftile.diagnosis.remedies import prices
from rooftile.diagnosis.remedies.remedy import Remedy
from rooftile.diagnosis.verdicts.findings import Finding


def without_checkpoint(calls: Sequence[StepCall], findings: Sequence[Finding]) -> Remedy | None:
    """Prices the step without checkpoints: what they run a second time is stored instead; None if they run nothing."""
    again = sorted({call.row for call in calls if call.again})
    if not again:
        return None
    stored: dict[int, int] = {}
    for call in calls:
        if call.again:
            stored |= call.writes
    module = next((findings[row].operation.module for row in again if findings[row].operation.module), "the step")
    return prices.store(
        [(row, findings[row]) for row in again], stored_bytes=sum(stored.values()), module=module.partition(".")[0]
    )


def recomputed(calls: Sequence[StepCall], findings: Sequence[Finding]) -> Remedy | None:
    """Prices the recomputation of what a forward's pointwise operators write for the backward alone; None without such."""
    forward = [call for call in calls if findings[call.row].operation.phase == "forward"]
    in_forward = {tensor for call in forward for tensor in call.reads}
    in_backward = {tensor for call in calls if findings[call.row].operation.phase == "backward" for tensor in call.reads}
    rows, stored = set(), 0
    for call in forward:
        if call.pointwise and call.writes and all(t in in_backward and t not in in_forward for t in call.writes):
            rows.add(call.row)
            stored += sum(call.writes.values())
    return prices.recompute([(row, findings[row]) for row in sorted(rows)], stored_bytes=stored)
