"""A step of a script without an optimiser: what it contains, by the calls that are seen in it."""

from __future__ import annotations

from collections import Counter

import pytest

from rooftile.diagnosis.programs.diagnose_script import diagnose_script

LIBRARY = """
import torch
def generate(model, x, count):
    for _ in range(count):
        x = model(x)
    return x
"""

SCRIPT = """
import sys, torch
from torch import nn
import some_library
kind = sys.argv[1]
torch.manual_seed(0)
model, loss = nn.Linear(8, 8), nn.MSELoss()

def manual():
    for _ in range(30):
        x = torch.rand(4, 8)
        model.zero_grad()
        loss(model(x), x).backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)

def functional():
    weight = torch.rand(8, 8, requires_grad=True)
    for _ in range(30):
        gradient, = torch.autograd.grad(torch.tanh(torch.rand(4, 8) @ weight).sum(), weight)
        with torch.no_grad():
            torch._foreach_sub_([weight], [gradient])

def micro():
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        for _ in range(3):
            x = torch.rand(4, 8)
            loss(model(x), x).backward()
        optimiser.step()
        optimiser.zero_grad()

def trained_after_a_test():
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for _ in range(20):
            x = torch.rand(4, 8)
            loss(model(x), x)
    for _ in range(20):
        x = torch.rand(4, 8)
        loss(model(x), x).backward()
        optimiser.step()

def test():
    with torch.no_grad():
        for _ in range(30):
            x = torch.rand(4, 8)
            loss(model(x), x)

def serve():
    with torch.inference_mode():
        for _ in range(30):
            some_library.generate(model, torch.rand(1, 8), 5)

def one_call():
    with torch.no_grad():
        for _ in range(30):
            model(torch.rand(4, 8))

def short():
    with torch.no_grad():
        x = torch.rand(4, 8)
        loss(model(x), x)
        loss(model(x), x)

globals()[kind]()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("loops")
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "some_library.py").write_text(LIBRARY)
    path = folder / "script.py"
    path.write_text("import sys, os\nsys.path.append(os.path.join(os.path.dirname(__file__), 'site-packages'))\n" + SCRIPT)
    return str(path)


@pytest.mark.parametrize(
    ("kind", "due"),
    [
        ("manual", {"forward addmm": 1, "forward mse_loss": 1, "backward mm": 1, "optimiser add_": 2}),
        ("functional", {"forward mm": 1, "forward tanh": 1, "backward mm": 1, "optimiser _foreach_sub_": 1}),
        ("micro", {"forward addmm": 3, "backward mm": 3, "optimiser add_": 2}),
        ("trained_after_a_test", {"forward addmm": 1, "backward mm": 1, "optimiser add_": 2}),
        ("test", {"forward addmm": 1, "forward mse_loss": 1, "forward rand": 1}),
        ("serve", {"forward addmm": 5, "forward rand": 1}),
        # such a call is made again, and with other batches
        ("one_call", {"forward addmm": 1, "forward rand": 0}),
        ("short", {"forward addmm": 0, "forward mse_loss": 1}),
    ],
)
def test_what_a_step_contains(script: str, kind: str, due: dict[str, int]) -> None:
    found = diagnose_script(script, [kind], budget=0.2)
    calls: Counter[str] = Counter()
    for op in found.ops:
        calls[f"{op.phase} {op.op.removeprefix('aten::')}"] += op.calls
    assert {name: calls[name] for name in due} == due
    assert (found.step.experiments["double_batch_us"] is not None) == (kind in ("one_call", "short"))
