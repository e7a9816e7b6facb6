"""Several processes of one program: each writes its own diagnosis, and rank 0 joins them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rooftile as rt
from rooftile.diagnosis.programs import ranks
from rooftile.diagnosis.programs.ranks import Rank

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(64, 64))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 64)
while True:
    optimiser.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    dist.all_reduce(loss.detach())
    optimiser.step()
"""


def test_torchrun(tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "step.json"
    script.write_text(SCRIPT)
    (tmp_path / "step-rank1.json").write_text("of an earlier run")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    options = ["--device", "cpu", "--budget", "0.5", "--json", str(out)]
    command = [*launch, sys.executable, "-m", "rooftile", "diagnose", str(script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    joined = json.loads(out.read_text())
    assert joined["form"] == "rooftile.diagnosis.ranks/1"
    assert len(joined["ranks"]) == 2
    for found in joined["ranks"]:
        collective = next(op for op in found["ops"] if op["op"] == "c10d::allreduce_")
        assert collective["bound"] == "communication"
    assert done.stdout.count("Step ") == 1
    assert "is the slowest, by" in done.stdout or "all take the same time within 5 %" in done.stdout


IN_PYTHON = """
import sys
import time
import torch
import torch.distributed as dist
import rooftile as rt
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(64, 64))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)


def train_step(x):
    optimiser.zero_grad()
    # one process is slower than its budget allows
    time.sleep(0.1 if dist.get_rank() else 0.0)
    model(x).square().mean().backward()
    optimiser.step()


found = rt.diagnose(train_step, torch.randn(32, 64), budget=0.3)
print(f"rank {dist.get_rank()}", found.step.experiments["why_not"]["batch"], found.step.idle_us, flush=True)
train_step(torch.randn(32, 64))
dist.destroy_process_group()
"""


def test_a_call_in_each_of_several_processes(tmp_path: Path) -> None:
    """No process makes a step that the others do not make, whatever its budget allows."""
    script = tmp_path / "train.py"
    script.write_text(IN_PYTHON)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in (0, 1):
        assert f"rank {rank} the step meets other processes, which would have to make it as often" in done.stdout
    # the faster one waits for what the slower one sends
    line = next(line for line in done.stdout.splitlines() if line.startswith("rank 0"))
    assert float(re.search(r"'exchange': ([\d.]+)", line)[1]) > 5e4, line


def test_ranks_are_told_apart_beyond_noise() -> None:
    step = {"time_us": 1000.0, "overhead_share": 0.25, "bound": "memory"}
    lines = ranks.table([{"step": step}, {"step": step | {"time_us": 1030.0}}])
    assert lines.endswith("all take the same time within 5 %")
    lines = ranks.table([{"step": step}, None, {"step": step | {"time_us": 1200.0}}])
    assert lines.endswith("rank 2 is the slowest, by 20 % of the fastest one's step")


def test_a_rank_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rt.diagnose(torch.relu, torch.ones(8), budget=0.1)
    out = tmp_path / "step.json"
    text = ranks.write(found, Rank(0, 2), out, patience=0.0)
    assert "1  no diagnosis: the process ended" in text
    assert json.loads(out.read_text())["ranks"][1] is None
    assert ranks.write(found, Rank(1, 2), out, patience=0.0) == ""
    text = ranks.write(found, Rank(0, 2), out, patience=0.0)
    assert "no diagnosis" not in text
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks.forget(out)
    assert not ranks.file_of(1, out).exists()
    assert ranks.file_of(0, out).exists()
