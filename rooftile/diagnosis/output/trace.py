"""Verdicts as arguments of the events of a Chrome trace, as chrome://tracing and Perfetto show them.

The n-th event of an operator is its n-th call in the step. An operator that another counted one calls has no verdict of its own,
and a kernel has the verdict of the operator that launched it.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rooftile.diagnosis.verdicts.findings import Finding

Event = dict[str, Any]
# categories of events that are operators: torch's own, and the kernels of a compiled program on a CPU
OPERATORS = ("cpu_op", "user_annotation")


class Trace:
    """The profiled step of a diagnosis, as the profiler wrote it, with the findings to add.

    packed: from `pack`.
    """

    def __init__(self, packed: bytes, findings: Sequence[Finding]) -> None:
        self._packed, self._findings = packed, tuple(findings)

    def annotated(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Returns the trace with verdicts, and a note for each operator that it calls differently from the counted step."""
        return annotate(json.loads(zlib.decompress(self._packed)), self._findings)


def pack(profiler: Any) -> bytes:
    """Returns the trace that a profiler exports, compressed: a step of ten thousand kernels takes about a megabyte."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return zlib.compress(file.read_bytes(), 1)


def annotate(trace: Mapping[str, Any], findings: Sequence[Finding]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns a profiler's trace of the same step with verdicts, and a note for each operator that it calls differently.

    An operator that is called as often as in the counted step has its verdicts call by call. Otherwise a call has the verdict of
    the row that takes the most time: rows of one operator differ in their shapes and modules.

    trace: `json.load` of the file that torch.profiler's export_chrome_trace wrote.
    """
    calls: defaultdict[str, list[tuple[int, Finding]]] = defaultdict(list)
    for f in findings:
        calls[_overload_less(f.operation.op)] += [(index, f) for index in f.operation.indices]
    events = [dict(event) for event in trace["traceEvents"]]
    outer = _outermost([e for e in events if e.get("cat") in OPERATORS and _overload_less(e["name"]) in calls])
    seen: Counter[str] = Counter(_overload_less(event["name"]) for event in outer)
    notes = [
        f"the trace has {seen[op]} calls of {op}, and the counted step {len(listed)}: each has the verdict of its slowest row"
        for op, listed in calls.items()
        if seen[op] != len(listed)
    ]
    left = {op: iter(sorted(listed, key=lambda item: item[0])) for op, listed in calls.items()}
    verdicts = []
    for event in outer:
        op = _overload_less(event["name"])
        matched = seen[op] == len(calls[op])
        f = next(left[op])[1] if matched else max((f for _, f in calls[op]), key=lambda f: f.time_us)
        event["args"] = {**event.get("args", {}), **_words(f)}
        verdicts.append(f)
    _annotate_kernels(events, outer, verdicts)
    return {**trace, "traceEvents": events}, tuple(notes)


def _outermost(events: Sequence[Event]) -> list[Event]:
    """The events that no other one of their thread contains, in the order of time."""
    found: list[Event] = []
    end: dict[Any, float] = {}
    for event in sorted(events, key=lambda e: (float(e["ts"]), -float(e.get("dur", 0.0)))):
        start, thread = float(event["ts"]), event.get("tid")
        if start >= end.get(thread, float("-inf")):
            found.append(event)
            end[thread] = start + float(event.get("dur", 0.0))
    return found


def _annotate_kernels(events: Iterable[Event], outer: Sequence[Event], verdicts: Sequence[Finding]) -> None:
    """A kernel names the innermost operator that launched it, which may lie inside the one with the verdict."""
    events = list(events)
    by_thread: defaultdict[Any, list[tuple[float, float, Finding]]] = defaultdict(list)
    for event, f in zip(outer, verdicts, strict=True):
        start = float(event["ts"])
        by_thread[event.get("tid")].append((start, start + float(event.get("dur", 0.0)), f))
    launched_by: dict[Any, Finding] = {}
    at: Counter[Any] = Counter()
    for event in sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: float(e["ts"])):
        thread, time, link = event.get("tid"), float(event["ts"]), event.get("args", {}).get("External id")
        spans = by_thread[thread]
        # spans of one thread do not overlap, so the first that has not ended is the only one around
        while at[thread] < len(spans) - 1 and spans[at[thread] + 1][0] <= time:
            at[thread] += 1
        if link is not None and spans and spans[at[thread]][0] <= time <= spans[at[thread]][1]:
            launched_by[link] = spans[at[thread]][2]
    for event in events:
        found = launched_by.get(event.get("args", {}).get("External id"))
        if event.get("cat") == "kernel" and found is not None:
            event["args"] = {**event["args"], **_words(found)}


def _words(f: Finding) -> dict[str, str]:
    v = f.verdict
    return {
        "bound": v.bound or "unknown",
        "unit": v.unit or "unknown",
        "confidence": v.confidence,
        "confirmed by": v.confirmed_by,
        "module": f.operation.module,
        "where": f.operation.where,
    }


def _overload_less(op: str) -> str:
    """Returns the operator's name as the profiler writes it: aten::add for aten::add.Tensor."""
    return op.split(".")[0]
