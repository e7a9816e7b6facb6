"""Verdicts as arguments of the events of a Chrome trace, as chrome://tracing and Perfetto show them.

The n-th event of an operator is its n-th call in the step, and a kernel belongs to the operator that launched it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rooftile.diagnosis.verdicts.findings import Finding


def annotate(trace: Mapping[str, Any], findings: Sequence[Finding]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns a profiler's trace of the same step with verdicts, and a note for each operator that it calls differently.

    trace: `json.load` of the file that torch.profiler's export_chrome_trace wrote.
    """
    calls: defaultdict[str, list[tuple[int, Finding]]] = defaultdict(list)
    for f in findings:
        calls[f.operation.op] += [(index, f) for index in f.operation.indices]
    events = [dict(event) for event in trace["traceEvents"]]
    named: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: float(e["ts"])):
        named[_overload_less(event["name"])].append(event)
    notes, launched_by = [], {}
    for op, listed in calls.items():
        seen = named[_overload_less(op)]
        if len(seen) != len(listed):
            notes.append(f"the trace has {len(seen)} calls of {op}, and the counted step {len(listed)}: they have no verdict")
            continue
        for event, (_, f) in zip(seen, sorted(listed, key=lambda item: item[0]), strict=True):
            event["args"] = {**event.get("args", {}), **_words(f)}
            launched_by[event["args"].get("External id")] = f
    for event in events:
        link = event.get("args", {}).get("External id")
        if event.get("cat") == "kernel" and link is not None and link in launched_by:
            event["args"] = {**event["args"], **_words(launched_by[link])}
    return {**trace, "traceEvents": events}, tuple(notes)


def _words(f: Finding) -> dict[str, str]:
    v = f.verdict
    return {
        "verdict": f"{v.bound} ({v.unit})" if v.bound and v.unit else v.bound or "none",
        "confidence": v.confidence,
        "confirmed by": v.confirmed_by,
        "module": f.operation.module,
        "where": f.operation.where,
    }


def _overload_less(op: str) -> str:
    """Returns the operator's name as the profiler writes it: aten::add for aten::add.Tensor."""
    return op.split(".")[0]
