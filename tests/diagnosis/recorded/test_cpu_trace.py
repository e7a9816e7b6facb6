"""Traces that torch.profiler makes here: what a live diagnosis of the same program finds, is found in them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

import rooftile as rt
from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.diagnosis.watching.watch import Watch
from rooftile.errors import InvalidInput

CPU = [ProfilerActivity.CPU]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 24)
        self.first, self.second = nn.Linear(24, 65), nn.Linear(65, 31)
        self.norm = nn.LayerNorm(24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(ids))
        return self.second(F.gelu(self.first(x)))


def training() -> Callable[[], object]:
    torch.manual_seed(0)
    net, ids = Net(), torch.randint(0, 31, (5, 7))
    optimiser = torch.optim.AdamW(net.parameters(), fused=True)

    def train_step() -> None:
        optimiser.zero_grad()
        loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimiser.step()
        loss.item()

    train_step()
    return train_step


def record(step: Callable[[], object], path: Path, **options: Any) -> Path:
    with profile(activities=CPU, **options) as profiler:
        step()
    profiler.export_chrome_trace(str(path))
    return path


def counted(found: Diagnosis) -> dict[tuple[str, str], tuple[int, int | None, int | None]]:
    """Calls, FLOPs and bytes of each operator in each phase."""
    result: dict[tuple[str, str], list[Any]] = {}
    for op in found.ops:
        row = result.setdefault((op.op, op.phase), [0, 0, 0])
        row[0] += op.calls
        row[1] = None if row[1] is None or op.flops is None else row[1] + op.flops
        row[2] = None if row[2] is None or op.bytes is None else row[2] + op.bytes
    return {key: tuple(row) for key, row in result.items()}  # type: ignore[misc]


def test_a_trace_has_the_operators_calls_and_counts_of_a_live_diagnosis(tmp_path: Path) -> None:
    step = training()
    live = counted(rt.diagnose(step, budget=0.01))
    found = rt.diagnosis.from_trace(record(step, tmp_path / "t.json", record_shapes=True))
    recorded = counted(found)
    assert {key: row[0] for key, row in recorded.items()} == {key: row[0] for key, row in live.items()}
    assert {key: row[1] for key, row in recorded.items()} == {key: row[1] for key, row in live.items()}
    # rows of an embedding that differ are known only by their values
    by_values = {key for key in live if "embedding" in key[0]}
    assert by_values
    for key in live.keys() - by_values:
        assert recorded[key][2] == live[key][2], key
    for key in by_values:
        assert (recorded[key][2] or 0) >= (live[key][2] or math.inf)
    assert {op.confidence for op in found.ops} == {"modelled"}
    assert found.step.idle_us["host"] + sum(op.time_us for op in found.ops) <= 1.001 * found.step.time_us


def test_attention_and_convolutions_are_counted_as_they_are_watched(tmp_path: Path) -> None:
    conv, x = nn.Conv2d(3, 6, 3, padding=1), torch.randn(2, 3, 9, 11)
    q = torch.randn(2, 3, 17, 8)

    def step() -> None:
        conv(x).relu_().amax()
        F.scaled_dot_product_attention(q, q, q, is_causal=True).double().sort()
        torch.cat([q, q], 1).pow(2).mean((1, 2), keepdim=True)
        torch.where(q > 0, q, 0.0).std()

    with torch.no_grad():
        with Watch() as watch:
            step()
        path = record(step, tmp_path / "t.json", record_shapes=True)
    found = counted(rt.diagnosis.from_trace(path))
    live: dict[str, tuple[int, int | None, int | None]] = {
        one.op: (one.calls, one.flops and one.flops * one.calls, one.bytes) for one in watch.operations
    }
    assert {"aten::convolution", "aten::cat"} <= live.keys()
    assert {op: row[:2] for (op, _), row in found.items()} == {op: row[:2] for op, row in live.items()}
    # two views of one tensor are read once; a trace does not know that they are one
    for op in live.keys() - {"aten::cat"} - {op for op in live if "attention" in op}:
        assert found[op, "forward"][2] == live[op][2], op


def test_modules_functions_and_steps_are_read_where_they_were_recorded(tmp_path: Path) -> None:
    step = training()
    with profile(
        activities=CPU, record_shapes=True, with_stack=True, with_modules=True, schedule=schedule(wait=1, warmup=1, active=3),
        on_trace_ready=tensorboard_trace_handler(str(tmp_path), use_gzip=True),
    ) as profiler:  # fmt: skip
        for _ in range(5):
            step()
            profiler.step()
    (path,) = tmp_path.glob("*.json.gz")
    found = rt.diagnosis.from_trace(path, step=3)
    assert found.program.step.startswith("ProfilerStep#3, recorded")
    calls = Counter({(op.op, op.phase): 0 for op in found.ops})
    for op in found.ops:
        calls[op.op, op.phase] += op.calls
    # the trace has three steps, and this is one
    assert (calls["aten::addmm", "forward"], calls["aten::_fused_adamw_", "optimiser"]) == (2, 1)
    modules = {(op.op, op.phase): op.module for op in found.ops}
    assert modules["aten::native_layer_norm", "forward"] == "Net.LayerNorm"
    assert modules["aten::native_layer_norm_backward", "backward"] == "Net.LayerNorm"
    assert modules["aten::gelu", "forward"] == "Net"
    lines = {op.where for op in found.ops if op.op == "aten::gelu"}
    assert len(lines) == 1
    assert lines.pop().endswith(f"test_cpu_trace.py:{Net.forward.__code__.co_firstlineno} (forward)")
    assert rt.diagnosis.from_trace(path).program.step.split(",")[0] in {f"ProfilerStep#{n}" for n in (2, 3, 4)}
    with pytest.raises(InvalidInput, match=r"has no ProfilerStep#5; it has 2 to 4$"):
        rt.diagnosis.from_trace(path, step=5)


def test_a_profile_without_shapes_has_times_and_no_counts(tmp_path: Path) -> None:
    step = training()
    path = record(step, tmp_path / "t.json")
    found = rt.diagnosis.from_trace(path)
    assert counted(found)["aten::addmm", "forward"] == (2, None, None)
    assert {op.bound for op in found.ops} == {None}
    assert found.uncounted == ()
    assert any("record with record_shapes=True" in note for note in found.notes)
    with pytest.raises(InvalidInput, match=r"has no ProfilerStep#0; its program called no"):
        rt.diagnosis.from_trace(path, step=0)


def test_a_sleep_is_named_by_its_function(tmp_path: Path) -> None:
    import time

    x = torch.randn(64, 64)

    def wait_for_data() -> None:
        time.sleep(0.05)

    def step() -> None:
        x @ x
        wait_for_data()
        x @ x

    found = rt.diagnosis.from_trace(record(step, tmp_path / "t.json", record_shapes=True, with_stack=True))
    assert found.step.bound == "host"
    (wait,) = [remedy for remedy in found.remedies if remedy.name == "remove a wait"]
    assert "(wait_for_data)" in wait.how
    assert wait.predicted_us > 45_000


def test_a_loader_is_named_without_a_stack(tmp_path: Path) -> None:
    import time

    class Slow(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, n: int) -> torch.Tensor:
            time.sleep(0.02)
            return torch.ones(3)

    loader = torch.utils.data.DataLoader(Slow(), batch_size=1)

    def step() -> None:
        for x in loader:
            x.relu()

    found = rt.diagnosis.from_trace(record(step, tmp_path / "t.json", record_shapes=True))
    assert any("DataLoader" in remedy.how for remedy in found.remedies), found.remedies


def test_the_cpu_of_another_machine_has_no_ceilings(tmp_path: Path) -> None:
    path = record(training(), tmp_path / "t.json", record_shapes=True)
    changed = json.loads(path.read_text()) | {"host_name": "elsewhere"}
    path.write_text(json.dumps(changed))
    found = rt.diagnosis.from_trace(path)
    assert {op.bound for op in found.ops} == {None}
    assert found.ceilings["kind"] == "none"
    assert counted(found)["aten::addmm", "forward"][1] == 2 * 35 * 65 * (24 + 31)
    assert any("another machine" in note for note in found.notes)
    assert "elsewhere" not in found.to_json()
    page = found.to_html()
    assert "The operators, without roofs" in page
    assert "measured on this machine" not in page
    with pytest.raises(InvalidInput, match="no kernels of a GPU"):
        rt.diagnosis.from_trace(path, device_name="H100")
    with pytest.raises(InvalidInput, match=r"no datasheet of 'H1' is known; has B200"):
        rt.diagnosis.from_trace(path, device_name="H1")
    with pytest.raises(InvalidInput, match="step is 'train_step'; must be the number"):
        rt.diagnosis.from_trace(path, step="train_step")  # type: ignore[arg-type]
