"""Verdicts in a trace that torch.profiler wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from rooftile.diagnosis.output.trace import annotate
from rooftile.diagnosis.verdicts.findings import Finding
from tests.diagnosis.machine import Machine, Work, finding

CPU = Machine(flops_per_us=1e5, bytes_per_us=1e4, cache_bytes_per_us=1e5, fixed_us=5.0)


def found(op: str, work: Work, *indices: int) -> Finding:
    its = finding(CPU, work, op=op, calls=len(indices))
    return replace(its, operation=replace(its.operation, indices=indices))


MEMORY, COMPUTE = Work(bytes=1e7, flops=1e3), Work(bytes=1e3, flops=1e8)


def test_every_call_gets_the_verdict_of_its_row(tmp_path: Path) -> None:
    """mul, mm, mul, mm: the first product is in another row than the second."""
    x = torch.randn(8, 8)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        torch.mm(torch.mm(x * 2, x) * 2, x)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    before = json.loads((tmp_path / "trace.json").read_text())
    rows = [found("aten::mm", COMPUTE, 1), found("aten::mm", MEMORY, 3), found("aten::mul.Tensor", MEMORY, 0, 2)]
    after, notes = annotate(before, rows)
    assert notes == ()
    operators = [e for e in after["traceEvents"] if e.get("cat") == "cpu_op"]
    operators.sort(key=lambda e: e["ts"])
    verdicts = [(e["name"], e["args"].get("verdict")) for e in operators if e["name"] in ("aten::mm", "aten::mul")]
    assert verdicts == [
        ("aten::mul", "memory (DRAM)"), ("aten::mm", "compute (fp32)"), ("aten::mul", "memory (DRAM)"),
        ("aten::mm", "memory (DRAM)"),
    ]  # fmt: skip
    assert "verdict" not in json.dumps(before)
    assert len(after["traceEvents"]) == len(before["traceEvents"])


def test_kernels_have_the_verdict_of_their_operator() -> None:
    trace = {"traceEvents": [
        {"cat": "cpu_op", "name": "aten::mm", "ts": 1, "args": {"External id": 7}},
        {"cat": "kernel", "name": "gemm", "ts": 2, "args": {"External id": 7}},
        {"cat": "kernel", "name": "other", "ts": 3, "args": {"External id": 8}},
        {"cat": "cuda_runtime", "name": "launch", "ts": 1},
    ]}  # fmt: skip
    after, _ = annotate(trace, [found("aten::mm", COMPUTE, 0)])
    assert [e.get("args", {}).get("verdict") for e in after["traceEvents"]] == ["compute (fp32)", "compute (fp32)", None, None]


def test_another_number_of_calls_is_said() -> None:
    trace = {"traceEvents": [{"cat": "cpu_op", "name": "aten::mm", "ts": 1}]}
    after, notes = annotate(trace, [found("aten::mm", COMPUTE, 0, 1)])
    assert notes == ("the trace has 1 calls of aten::mm, and the counted step 2: they have no verdict",)
    assert "args" not in after["traceEvents"][0]
