"""Scripts that compile their model: the tool adds nothing to what the compiler sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from rooftile.diagnosis.programs.diagnose_script import diagnose_script

SCRIPT = """
import torch
from torch import nn

WIDTH = 24


def noting(graph, inputs):
    with open({log!r}, "a") as log:
        log.write("graph ")
    return graph.forward


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        # a global of the script, which compiled code looks for by the script's name
        return self.up(x).view(-1, WIDTH).relu()


model = torch.compile(nn.Sequential(Layer(), Layer()), backend=noting)
optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)


def train_step(x):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().sum()
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()


for _ in range(30):
    train_step(torch.randn(16, WIDTH))
"""


@pytest.mark.parametrize("function", [None, "train_step"])
def test_a_model_is_compiled_once_and_in_one_piece(function: str | None, tmp_path: Path) -> None:
    path, log = tmp_path / "train.py", tmp_path / "log"
    path.write_text(SCRIPT.format(log=str(log)))
    found = diagnose_script(str(path), function=function, budget=0.3)
    # a named function is also called with half and twice its batch where there is time, for which one more graph is made
    assert log.read_text() in (("graph ", "graph graph ") if function else ("graph ",))
    assert found.step.time_us > 0


MANY = """
import torch
from torch import nn


def noting(graph, inputs):
    with open({log!r}, "a") as log:
        log.write("graph ")
    return graph.forward


def layer(n):
    forward = eval(f"lambda self, x: self.up(x).relu() + {{n}}")
    made = type(f"Layer{{n}}", (nn.Module,), {{"forward": forward}})()
    made.up = nn.Linear(8, 8)
    return made


layers = [torch.compile(layer(n), backend=noting, fullgraph=True) for n in range(12)]
optimiser = torch.optim.SGD([p for one in layers for p in one.parameters()], lr=0.01)
for _ in range(30):
    x = torch.randn(4, 8)
    sum(one(x).sum() for one in layers).backward()
    optimiser.step()
"""


def test_each_of_many_compiled_modules_is_compiled(tmp_path: Path) -> None:
    """Dynamo compiles a function eight times, and no function of the tool may stand for twelve modules."""
    path, log = tmp_path / "train.py", tmp_path / "log"
    path.write_text(MANY.format(log=str(log)))
    diagnose_script(str(path), budget=5)
    assert log.read_text() == "graph " * 12


CALLED = """
import torch
from torch import nn


def noting(graph, inputs):
    with open({log!r}, "a") as log:
        log.write("graph ")
    return graph.forward


model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend=noting, fullgraph=True)
x = torch.randn(4, 8)
for _ in range(5):
    model(x)
"""


def test_a_compiled_call_is_made_again_as_it_was_compiled(tmp_path: Path) -> None:
    path, log = tmp_path / "infer.py", tmp_path / "log"
    path.write_text(CALLED.format(log=str(log)))
    found = diagnose_script(str(path), budget=0.1)
    assert log.read_text() == "graph "
    assert "OptimizedModule" in found.program.step
