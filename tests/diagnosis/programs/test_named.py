"""`--step NAME` finds what a global of that name holds, whatever kind of callable it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rooftile.diagnosis.programs.diagnose_script import diagnose_script

SCRIPT = """
import sys
from functools import partial
import torch
from torch import nn
kind = sys.argv[1]
model = nn.Linear(8, 8)

def make(scale):
    def step(x):
        return torch.tanh(model(x)) * scale
    return step

class Trainer:
    def __init__(self, model):
        self.model = model
    def step(self, x):
        return torch.tanh(self.model(x))
    def __call__(self, x):
        return self.step(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
    def forward(self, x):
        return torch.tanh(self.inner(x))

def scaled(scale, x, *, shift=0.0):
    return torch.tanh(model(x)) * scale + shift

other = make(3.0)
trainer = Trainer(model)
step = {
    "closure": lambda: make(2.0), "lambda": lambda: (lambda x: torch.tanh(model(x))), "method": lambda: trainer.step,
    "partial": lambda: partial(scaled, 2.0, shift=1.0), "callable": lambda: trainer, "module": Net, "attribute": lambda: None,
}[kind]()
for n in range(3):
    # the other closure has the same code
    other(torch.rand(3, 8))
    (trainer.step if kind == "attribute" else step)(torch.rand(5, 8))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("named") / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize("kind", ["closure", "lambda", "partial", "method", "callable", "module", "attribute"])
def test_a_global_is_found_whatever_it_holds(script: str, kind: str, tmp_path: Path) -> None:
    name = "trainer.step" if kind == "attribute" else "step"
    found = diagnose_script(script, [kind], function=name, budget=0.2)
    assert found.program.step == name
    (tanh,) = [op for op in found.ops if op.op == "aten::tanh"]
    # five rows, of which a half and twice as many are tried as well
    assert (tanh.calls, tanh.special) == (1, 5 * 8)
    assert found.step.experiments["double_batch_us"] is not None
    # a partial function keeps what it was given
    assert {op.op for op in found.ops if op.op == "aten::add"} == ({"aten::add"} if kind == "partial" else set())
