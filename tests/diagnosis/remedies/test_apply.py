"""Remedies that are tried: their savings are measured, and the program is as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile.diagnosis.programs.diagnose_script import diagnose_script
from rooftile.diagnosis.remedies.apply import Trial
from rooftile.diagnosis.remedies.recorded import COMPILE
from rooftile.diagnosis.remedies.remedy import Remedy
from rooftile.errors import InvalidInput
from scripts import write_recorded_prices
from tests.diagnosis.operators import ten_passes
from tests.diagnosis.remedies.test_propose import Attention as ByHand
from tests.diagnosis.remedies.test_propose import Layers


def remedy(found: rt.diagnosis.Diagnosis, name: str) -> Remedy:
    return next(r for r in found.remedies if r.name == name)


def test_one_fused_loop_takes_the_place_of_ten() -> None:
    x = torch.randn(1500, 1500)
    found = rt.diagnose(ten_passes(x), apply=["compile"], budget=1)
    compiled = remedy(found, "compile")
    assert compiled.predicted_us > 0
    assert compiled.measured_us is not None
    assert f"{20 * 2 * x.nbytes / 1e6 - 2 * x.nbytes / 1e6:,.1f} MB" in compiled.how


def test_modules_are_as_before() -> None:
    model, x = Layers(ByHand, 2), torch.randn(2, 24, 32)
    before = model(x)
    found = rt.diagnose(model, x, backward=True, apply=["compile", "attention", "dtype", "batch", "graph", "pad"], budget=1)
    assert all(part._compiled_call_impl is None for part in model.modules())
    assert not rt.is_enabled()
    assert torch.equal(model(x), before)
    for name in ("compile", "narrower dtype: bf16", "another attention", "larger batch"):
        assert remedy(found, name).measured_us is not None, name
    assert "graph could not be tried: needs a GPU" in found.notes
    assert any(note.startswith("pad could not be tried") for note in found.notes)


def test_transformers_attention_is_put_back() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50,
        attn_implementation="eager",
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config), torch.randint(50, (1, 40))
    found = rt.diagnose(lambda: model(input_ids=ids), apply=["attention"], budget=1)
    assert model.config._attn_implementation == "eager"
    assert remedy(found, "another attention").measured_us is not None


def test_a_change_that_fails_is_a_note() -> None:
    weight = torch.randn(8, 8)

    class Strict(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.is_autocast_enabled("cpu"):
                raise ValueError("fp32 only")
            return x @ weight

    found = rt.diagnose(Strict(), torch.randn(8, 8), apply="dtype", budget=1)
    assert "dtype could not be tried: fp32 only" in found.notes


def test_a_remedy_that_nobody_knows() -> None:
    with pytest.raises(InvalidInput, match="apply has 'magic'; it takes graph, compile, attention, dtype, batch, pad"):
        rt.diagnose(torch.relu, torch.ones(2), apply=["magic"])


TRAINING = """
import torch
from torch import nn
with open({log!r}, "a") as log:
    log.write("run ")
model = nn.Linear(64, 64)
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimiser.zero_grad()
    model(torch.randn(256, 64)).square().sum().backward()
    optimiser.step()
"""


def test_a_script_is_run_again_with_the_change(tmp_path: Path) -> None:
    path, log = tmp_path / "train.py", tmp_path / "log"
    path.write_text(TRAINING.format(log=str(log)))
    found = diagnose_script(str(path), apply=["dtype"], budget=1)
    assert log.read_text() == "run run "
    assert remedy(found, "narrower dtype: bf16").measured_us is not None


def test_a_script_is_not_run_a_third_time_for_a_change_that_is_far_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial ends early, which is no end of the script."""
    monkeypatch.setattr("rooftile.diagnosis.remedies.apply.HOPELESS", 0.0)
    path, log = tmp_path / "train.py", tmp_path / "log"
    path.write_text(TRAINING.format(log=str(log)))
    found = diagnose_script(str(path), apply=["dtype"], budget=1)
    assert log.read_text() == "run run "
    assert remedy(found, "narrower dtype: bf16").measured_us is not None


def test_a_measured_saving_is_shared_by_remedies_of_one_name() -> None:
    found = rt.diagnose(torch.relu, torch.ones(2), budget=0.1)
    two = [Remedy(name="pad to tiles", ops=(n,), predicted_us=us, how="", changes="memory") for n, us in ((0, 30.0), (1, 10.0))]
    object.__setattr__(found, "remedies", tuple(two))
    assert [r.measured_us for r in found.measured("pad to tiles", 20.0).remedies] == [15.0, 5.0]


def test_a_saving_is_of_the_step_that_was_diagnosed() -> None:
    """Neighbours in time are compared: a machine that is slower for a while is so with and without the change."""
    trial = Trial("dtype", torch.device("cpu"), 100.0)
    trial._before, trial._after = [100.0, 100.0, 400.0, 500.0, 100.0], [80.0, 80.0, 320.0, 400.0, 80.0]
    assert trial.saved_us == pytest.approx(20.0)


@pytest.fixture
def quickly_compiled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A compiler that takes no time and changes nothing, with what it was given; experiments take no time either."""
    given: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda made, **unused: given.append(made) or made)
    monkeypatch.setattr("rooftile.diagnosis.observer.measure_all", lambda *unused: ({}, []))
    return given


def test_compile_is_tried_where_the_budget_allows_it(quickly_compiled: list[object]) -> None:
    x = torch.randn(600, 600)
    found = rt.diagnose(ten_passes(x), budget=20)
    assert len(quickly_compiled) == 1
    compiled = remedy(found, "compile")
    assert compiled.measured_us is not None
    assert "recorded programs" not in compiled.how
    # on a busy machine it may have been slower
    (line,) = [line for line in str(found).splitlines() if line.startswith("  compile: ")]
    assert ", tried; " in line


def test_without_time_for_it_compile_says_how_such_prices_fared(quickly_compiled: list[object]) -> None:
    x = torch.randn(600, 600)
    found = rt.diagnose(ten_passes(x), budget=1)
    assert quickly_compiled == []
    compiled = remedy(found, "compile")
    assert compiled.measured_us is None
    seen = COMPILE["cpu"]
    fared = f"on {seen.within} of {seen.programs} recorded programs such a price was within a factor of 2 of what it saved"
    words = f"; {fared}: it would be tried in about "
    assert words in compiled.how
    (line,) = [line for line in str(found).splitlines() if line.startswith("  compile: saves ")]
    assert ", computed; " in line


def test_a_program_is_as_before_when_compile_was_tried(quickly_compiled: list[object]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.GELU(), nn.GELU(), nn.LayerNorm(64))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(400, 64)
    before = [p.detach().clone() for p in model.parameters()]

    def train_step() -> None:
        optimiser.zero_grad()
        model(x).square().sum().backward()
        optimiser.step()

    found = rt.diagnose(train_step, budget=20)
    assert len(quickly_compiled) == 1
    assert remedy(found, "compile").measured_us is not None
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
    assert all(part._compiled_call_impl is None for part in model.modules())


def test_a_script_with_its_own_steps_is_not_run_again_for_compile(tmp_path: Path, quickly_compiled: list[object]) -> None:
    path, log = tmp_path / "train.py", tmp_path / "log"
    many = "nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.GELU(), nn.GELU(), nn.LayerNorm(64))"
    path.write_text(TRAINING.replace("nn.Linear(64, 64)", many).format(log=str(log)))
    found = diagnose_script(str(path), budget=20)
    assert log.read_text() == "run "
    assert quickly_compiled == []
    assert remedy(found, "compile").how.endswith("--apply compile tries it, in one more run of the script")


def test_the_packages_numbers_follow_from_the_recorded_programs() -> None:
    assert write_recorded_prices.read() == COMPILE
    rows = [
        {"case": case, "median_us": 1000.0, "measures": {"compile_predicted_us": price, "compile_measured_us": saved}}
        for case, price, saved in (
            ("a", 900.0, 1.0), ("a", 100.0, 51.0), ("b", 100.0, 201.0), ("c", 100.0, -90.0), ("d", 1.0, 1.0), ("e", 10.0, 20.0)
        )
    ]  # fmt: skip
    # the last row of a program counts, and d had no price
    assert write_recorded_prices.compared([*rows, {"case": "f", "median_us": 1.0, "measures": {}}]) == (4, 2)
