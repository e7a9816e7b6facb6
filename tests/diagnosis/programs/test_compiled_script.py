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
