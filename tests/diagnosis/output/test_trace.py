"""Verdicts in a trace that torch.profiler wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

import rooftile as rt
from rooftile.cli.app import app
from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.diagnosis.output.trace import annotate
from rooftile.diagnosis.verdicts.findings import Finding
from rooftile.errors import InvalidInput
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
    verdicts = [(e["name"], e["args"].get("unit")) for e in operators if e["name"] in ("aten::mm", "aten::mul")]
    assert verdicts == [
        ("aten::mul", "DRAM"), ("aten::mm", "fp32"), ("aten::mul", "DRAM"), ("aten::mm", "DRAM"),
    ]  # fmt: skip
    assert "confidence" not in json.dumps(before)
    assert len(after["traceEvents"]) == len(before["traceEvents"])


def test_kernels_have_the_verdict_of_the_operator_around_them() -> None:
    """A linear layer is counted as such, and the profiler says that the addmm inside it launched the kernel."""
    trace = {"traceEvents": [
        {"cat": "cpu_op", "name": "aten::linear", "ts": 1, "dur": 9, "tid": 1, "args": {"External id": 7}},
        {"cat": "cpu_op", "name": "aten::addmm", "ts": 2, "dur": 3, "tid": 1, "args": {"External id": 8}},
        {"cat": "kernel", "name": "gemm", "ts": 3, "args": {"External id": 8}},
        {"cat": "kernel", "name": "other", "ts": 4, "args": {"External id": 9}},
        {"cat": "cpu_op", "name": "aten::addmm", "ts": 5, "dur": 1, "tid": 2, "args": {"External id": 9}},
        {"cat": "cuda_runtime", "name": "launch", "ts": 1},
    ]}  # fmt: skip
    after, notes = annotate(trace, [found("aten::linear", COMPUTE, 0), found("aten::addmm", MEMORY, 1)])
    units = [e.get("args", {}).get("unit") for e in after["traceEvents"]]
    assert units == ["fp32", None, "fp32", "DRAM", "DRAM", None]
    assert notes == ()


def test_another_number_of_calls_is_said() -> None:
    trace = {"traceEvents": [{"cat": "cpu_op", "name": "aten::mm", "ts": 1}]}
    slow = replace(found("aten::mm", MEMORY, 2), time_us=1e9)
    after, notes = annotate(trace, [found("aten::mm", COMPUTE, 0, 1), slow])
    assert notes == ("the trace has 1 calls of aten::mm, and the counted step 3: each has the verdict of its slowest row",)
    assert after["traceEvents"][0]["args"]["unit"] == "DRAM"


def test_every_event_of_a_diagnosed_operator_has_its_verdict() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64).bfloat16().float())
    x = torch.randn(128, 64)

    def step() -> None:
        for _ in range(3):
            # `to` copies inside of `_to_copy`, and `contiguous` inside of `clone`
            model(x.to(torch.bfloat16).float().T.contiguous().T).sum().backward()

    found = rt.diagnose(step, budget=0.5)
    trace = json.loads(found.to_trace())
    events = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op"]
    leading = {op.op.split(".")[0] for op in found.ops}
    assert {"aten::addmm", "aten::mm", "aten::gelu"} <= leading
    for name in leading:
        given = [e["args"] for e in events if e["name"] == name and "confidence" in e["args"]]
        calls = sum(op.calls for op in found.ops if op.op.split(".")[0] == name)
        assert len(given) == calls, name
        assert all({"bound", "unit", "confidence", "confirmed by"} <= args.keys() for args in given)
        bounds = {(op.bound or "unknown") for op in found.ops if op.op.split(".")[0] == name}
        assert {args["bound"] for args in given} == bounds
    assert trace["rooftile"] == {"sentence": found.sentence, "notes": []}
    assert json.loads(found.to_json()).keys() == json.loads(Diagnosis.from_json(found.to_json()).to_json()).keys()
    assert "traceEvents" not in found.to_json()
    with pytest.raises(InvalidInput, match="has no trace, because it was read from JSON"):
        Diagnosis.from_json(found.to_json()).to_trace()


def test_the_command_writes_the_trace(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nx = torch.rand(64, 64)\ndef step():\n    return x @ x\nfor _ in range(30):\n    step()\n")
    out = tmp_path / "trace.json"
    words = ["diagnose", str(script), "--step", "step", "--device", "cpu", "--budget", "0.3", "--trace", str(out)]
    assert CliRunner().invoke(app, words).exit_code == 0
    (product,) = [e for e in json.loads(out.read_text())["traceEvents"] if e.get("name") == "aten::mm"]
    assert product["args"]["confidence"] in ("confirmed", "measured", "modelled", "contradicted")
