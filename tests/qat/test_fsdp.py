"""Two processes whose weights are sharded train as one process does, bit for bit in the loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rooftile as rt
from tests.qat.models import inputs, mlp

SCRIPT = """
import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.qat.models import inputs
from tests.qat.test_fsdp import prepared

warnings.filterwarnings("error", message=".*returned a view tensor")
dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
model = prepared(sys.argv[1])
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
losses = []
for _ in range(5):
    loss = model(inputs(seed=rank)).square().mean()
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    losses.append(loss.item() / 2)
if rank == 0:
    print(json.dumps([losses, model[0].qat.steps]))
dist.destroy_process_group()
"""


def prepared(case: str) -> torch.nn.Module:
    """The model of a case, as both processes and the one that they are compared with have it."""
    if case == "rounded":
        return rt.qat.prepare(mlp(), "int4:32")
    # masks stay for two steps; a decay that is seen in the loss
    return rt.qat.prepare(mlp(), None, sparsity=rt.sparsity.Recipe(decay=5.0, refresh=2 if case == "refreshed" else 1))


@pytest.mark.parametrize("case", ["rounded", "masked", "refreshed"])
def test_sharded_weights(tmp_path: Path, case: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), case]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found, steps = json.loads(done.stdout)
    model = prepared(case)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    due = []
    for _ in range(5):
        losses = [model(inputs(seed=rank)).square().mean() for rank in range(2)]
        (sum(losses) / 2).backward()
        optimiser.step()
        optimiser.zero_grad()
        due.append(sum(loss.item() for loss in losses) / 2)
    assert steps == 5
    torch.testing.assert_close(torch.tensor(found), torch.tensor(due), rtol=1e-4, atol=0)
