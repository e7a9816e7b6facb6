"""Diagnoses of programs whose answer is known, with wide margins."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rooftile as rt
from rooftile.cli.app import app
from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.diagnosis.output.json_rows import Op
from rooftile.diagnosis.programs.diagnose_script import diagnose_script
from rooftile.errors import InvalidInput
from tests.diagnosis.schema import SCHEMA, breaches


def leading(found: Diagnosis, name: str) -> Op:
    return next(op for op in found.ops if op.op == f"aten::{name}")


@pytest.fixture(scope="module")
def large() -> torch.Tensor:
    return torch.randn(3000, 4000)


def test_an_elementwise_operator_is_bound_by_memory(large: torch.Tensor) -> None:
    found = rt.diagnose(lambda: large + 1.5, budget=10)
    add = leading(found, "add")
    assert (add.flops, add.bytes) == (large.numel(), 2 * large.nbytes)
    assert add.bound in ("memory", "balanced")


def test_a_product_is_bound_by_compute_and_its_work_is_counted() -> None:
    x = torch.randn(768, 768)
    found = rt.diagnose(lambda: x @ x, budget=10)
    mm = leading(found, "mm")
    assert mm.flops == 2 * 768**3
    # on cores that others keep busy two experiments may differ
    assert mm.bound in ("compute", "balanced")


def test_a_product_with_few_rows_is_measured() -> None:
    """It reads 64 MiB for 32 million multiply-adds, which a core computes far below its roof."""
    weight, x = torch.randn(4096, 4096), torch.randn(1, 4096)
    found = rt.diagnose(lambda: x @ weight, budget=10)
    mm = leading(found, "mm")
    assert mm.confidence in ("measured", "confirmed")
    assert (mm.bound, mm.confidence) != ("compute", "confirmed")


def test_many_small_operators_are_overhead() -> None:
    def step() -> torch.Tensor:
        x = torch.ones(4)
        for _ in range(2000):
            x = x + 1
        return x

    found = rt.diagnose(step, budget=1)
    assert found.step.bound == "overhead"
    assert found.step.launches >= 2000
    assert leading(found, "add").calls == 2000


def test_a_sleep_is_the_hosts_and_has_its_line() -> None:
    x = torch.randn(64, 64)

    def step() -> None:
        x @ x
        time.sleep(0.05)

    found = rt.diagnose(step, budget=1)
    assert found.step.bound == "host"
    line = step.__code__.co_firstlineno + 2
    assert any(f"test_diagnose_call.py:{line}" in note for note in found.notes)


def test_a_training_step_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.5), nn.Linear(128, 8))
    optimiser = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 64)

    def step() -> None:
        optimiser.zero_grad()
        model(x).square().sum().backward()
        optimiser.step()

    step()
    before = deepcopy(model.state_dict()), deepcopy(optimiser.state_dict()), torch.get_rng_state()
    found = rt.diagnose(step, budget=1)
    assert {op.phase for op in found.ops} == {"forward", "backward", "optimiser"}
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), model.state_dict().values(), strict=True))
    assert str(before[1]) == str(optimiser.state_dict())
    assert torch.equal(before[2], torch.get_rng_state())


def test_a_module_with_its_backward_and_the_json_of_it() -> None:
    model, x = nn.Linear(256, 256), torch.randn(64, 256)
    found = rt.diagnose(model, x, backward=True, budget=1)
    assert {op.phase for op in found.ops} == {"forward", "backward"}
    assert model.weight.grad is None
    written = json.loads(found.to_json())
    assert list(breaches(written, SCHEMA)) == []
    assert Diagnosis.from_json(found.to_json()) == found
    assert str(found).startswith("Step ")


def test_times_of_operators_are_no_more_than_the_step(large: torch.Tensor) -> None:
    found = rt.diagnose(lambda: (large * 2).exp().sum(), budget=1)
    assert sum(op.time_us for op in found.ops) <= 1.02 * found.step.time_us


def test_twice_the_batch_is_tried() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    found = rt.diagnose(model, torch.randn(64, 512), budget=10)
    times = found.step.experiments
    assert times["half_batch_us"] > 0
    assert times["double_batch_us"] > 0
    assert "batch" not in times["why_not"]
    x = torch.randn(8, 512)
    alone = rt.diagnose(lambda: model(x), budget=5)
    assert alone.step.experiments["why_not"]["batch"] == "the inputs have no first axis in common"
    strict = rt.diagnose(lambda given: given + torch.ones(8, 512), x, budget=5)
    assert "must match" in strict.step.experiments["why_not"]["batch"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rt.diagnose(3), "diagnose takes a function or a module; got int"),
        (lambda: rt.diagnose(torch.relu, torch.ones(2), budget=0), "budget is 0; must be a positive number"),
        (lambda: rt.diagnose(torch.relu, torch.ones(2), backward=True), "no output requires a gradient"),
        (lambda: rt.diagnose(torch.sum, torch.ones(2), dim=0), r"no argument .dim.; .* own write .*partial"),
    ],
)
def test_bad_arguments(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        call()


@pytest.mark.parametrize("at", [0, 4, 13, 20])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, torch.OutOfMemoryError])
def test_an_interrupted_diagnosis_leaves_no_trace(at: int, error: type[BaseException]) -> None:
    model = nn.Linear(8, 8)
    optimiser = torch.optim.AdamW(model.parameters())
    x, calls = torch.randn(4, 8), 0

    def step() -> None:
        nonlocal calls
        optimiser.zero_grad()
        model(x).sum().backward()
        optimiser.step()
        if calls == at + 1:
            raise error("stop")
        calls += 1

    step()
    before, moments = deepcopy(model.state_dict()), [dict(state) for state in optimiser.state.values()]
    kept, numbers = deepcopy(moments), torch.get_rng_state()
    if at + 1 < 19:
        with pytest.raises(error, match="stop"):
            rt.diagnose(step, budget=0.2)
    else:
        rt.diagnose(step, budget=0.2)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    for state, old, values in zip(optimiser.state.values(), moments, kept, strict=True):
        for name, value in state.items():
            assert value is old[name], "a CUDA graph may have its address"
            assert torch.equal(value, values[name])
    assert torch.equal(torch.get_rng_state(), numbers)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@pytest.mark.parametrize("world", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_world_around_a_diagnosis(world: Callable[[], Any]) -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU()), torch.randn(4, 32)
    with world():
        enabled = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        found = rt.diagnose(model, x, budget=0.3)
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == enabled
    assert leading(found, "addmm").calls == 1
    assert leading(found, "gelu").module == "Sequential.1"


def test_a_step_that_fails_fails_here_too() -> None:
    def step() -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        rt.diagnose(step)


SCRIPT = """
import os
import sys
import time
import torch
from torch import nn
import rooftile

model = nn.Linear(32, 32)
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 32)


def train_step(batch, *, scale=1.0):
    optimiser.zero_grad()
    (model(batch) * scale).square().sum().backward()
    optimiser.step()


class Trainer:
    def step(self):
        train_step(x)


def batches():
    yield x


def main(kind):
    if kind == "function":
        for _ in range(2):
            train_step(x, scale=2.0)
    if kind == "method":
        Trainer().step()
    if kind == "optimiser":
        while True:
            train_step(x)
    if kind == "marked":
        while True:
            torch.ones(3)
            with rooftile.diagnosis.step():
                train_step(x)
    if kind == "module":
        model(x)
    if kind == "short":
        for _ in range(2):
            train_step(x)
    if kind == "few":
        for _ in range(5):
            train_step(x)
    if kind == "few marked":
        for _ in range(4):
            with rooftile.diagnosis.step():
                train_step(x)
    if kind == "modes":
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            model(x)
    if kind == "keywords":
        model(input=x)
    if kind == "fails late":
        model(x)
        raise ValueError("the script's own")
    if kind == "generator":
        list(batches())
    if kind == "serves":
        while True:
            model(x)
    if kind == "waits":
        while True:
            time.sleep(0.01)
    if kind == "forks":
        if os.fork() == 0:
            train_step(x)
            return
        while True:
            train_step(x)
    if kind == "fails":
        train_step(x)
        raise ValueError("the script's own")
    if kind == "exits":
        sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("scripts") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize(
    ("kind", "function", "phases"),
    [
        ("function", "train_step", {"forward", "backward", "optimiser"}),
        ("method", "Trainer.step", {"forward", "backward", "optimiser"}),
        ("optimiser", None, {"forward", "backward", "optimiser"}),
        ("marked", None, {"forward", "backward", "optimiser"}),
        ("module", None, {"forward"}),
        ("forks", None, {"forward", "backward", "optimiser"}),
        ("few", None, {"forward", "backward", "optimiser"}),
        ("few marked", None, {"forward", "backward", "optimiser"}),
    ],
)
def test_a_scripts_step_is_found(script: str, kind: str, function: str | None, phases: set[str]) -> None:
    call = nn.Module.__call__
    found = diagnose_script(script, [kind], function=function, budget=0.2)
    assert {op.phase for op in found.ops} == phases
    assert leading(found, "addmm").calls == 1
    assert nn.Module.__call__ is call
    if kind == "marked":
        assert not any(op.op == "aten::ones" for op in found.ops)
    runs = {"few": r"was run \d times until enough of its steps had been seen", "few marked": r"was run \d times"}
    assert any(re.search(runs.get(kind, "was run"), note) for note in found.notes) == (kind in runs)


def test_a_call_is_made_again_as_the_script_made_it(script: str) -> None:
    """In inference mode, under autocast; with half and twice its batch, by keyword too; named by its line."""
    found = diagnose_script(script, ["modes"], budget=0.2)
    assert leading(found, "addmm").op == "aten::addmm"
    assert {op.op for op in found.ops} >= {"aten::_to_copy"}
    assert re.fullmatch(r"the call of Linear at .*train\.py:\d+", found.program.step)
    # the lines around the call are those of the diagnosis, and not of the script
    assert all(op.where == "" for op in found.ops)
    for kind in ("module", "keywords"):
        batches = diagnose_script(script, [kind], budget=0.2).step.experiments
        assert batches["half_batch_us"] > 0
        assert batches["double_batch_us"] > 0
    with pytest.raises(InvalidInput, match="batches is a generator or a coroutine, whose call runs nothing"):
        diagnose_script(script, ["generator"], function="batches", budget=0.2)


@pytest.mark.parametrize(
    ("kind", "function", "words"),
    [
        ("short", None, r"ended after 2 steps; needs at least 3"),
        ("function", "no_such", "never called no_such"),
        ("nothing", None, "has no step: no optimiser stepped and no module was called"),
        ("exits", None, "ended with exit code 3"),
    ],
)
def test_a_script_without_a_step_gets_a_sentence(script: str, kind: str, function: str | None, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        diagnose_script(script, [kind], function=function, budget=0.5)


@pytest.mark.parametrize(("kind", "function"), [("optimiser", None), ("function", "train_step")])
def test_a_script_that_runs_on_another_device_is_told(script: str, kind: str, function: str | None) -> None:
    with pytest.raises(InvalidInput, match="the step ran on cpu, and cuda is expected"):
        diagnose_script(script, [kind], function=function, device="cuda", budget=0.2)


def test_a_script_that_never_ends(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftile.diagnosis.programs.diagnose_script.LEAST_PATIENCE", 2.0)
    # one that calls a module for ever: the call is its step
    assert {op.phase for op in diagnose_script(script, ["serves"], budget=0.2).ops} == {"forward"}
    with pytest.raises(InvalidInput, match="has reached no step in 2 seconds"):
        diagnose_script(script, ["waits"], budget=0.2)


def test_a_script_that_never_ends_in_the_background(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftile.diagnosis.programs.diagnose_script.LEAST_PATIENCE", 0.5)
    # a shell starts a job with & like this
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(InvalidInput, match=r"has reached no step in 0\.5 seconds"):
            diagnose_script(script, ["waits"], budget=0.05)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_script_that_fails_gets_a_sentence_with_its_own_error(script: str) -> None:
    with pytest.raises(InvalidInput, match=r"failed with ValueError: the script's own \(.*train\.py:\d+\) before") as caught:
        diagnose_script(script, ["fails"], budget=0.5)
    assert isinstance(caught.value.__cause__, ValueError)
    # what it did until then is diagnosed
    found = diagnose_script(script, ["fails late"], budget=0.2)
    assert leading(found, "addmm").calls == 1
    assert any("failed with ValueError: the script's own" in note for note in found.notes)
    with pytest.raises(InvalidInput, match="is not a file"):
        diagnose_script(script + "x")


def test_a_fault_of_the_diagnosis_is_not_the_scripts(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(observer: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("rooftile.diagnosis.observer.Observer.conclude", fails)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        diagnose_script(script, ["optimiser"], budget=0.2)


def test_the_command(script: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["diagnose", script, "--step", "train_step", "--device", "cpu", "--budget", "0.5", "--ops", "2", "--json", str(out)]
    result = CliRunner().invoke(app, [*words, "--", "function"])
    assert result.exit_code == 0, result.output
    assert "Step " in result.stdout
    assert "more: " in result.stdout
    assert list(breaches(json.loads(out.read_text()), SCHEMA)) == []
    result = CliRunner().invoke(app, ["diagnose", script, "--json", str(tmp_path)])
    assert isinstance(result.exception, InvalidInput)
