"""Two processes whose weights are sharded train as one process does, and save what one process would save."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import rooftile as rt
from tests.qat.models import inputs, mlp
from tests.qat.test_save import decoder

PROGRAM = """
import json
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import rooftile as rt
from tests.qat.models import inputs
from tests.qat.test_fsdp import CASES, SAVED, prepared
from tests.qat.test_save import VOCAB, decoder

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))


def train(case):
    model = prepared(case)
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
    return losses, model[0].qat.steps


tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(rank))


def save(name, format, options, layout):
    folder = Path(sys.argv[1]) / name
    model = rt.qat.prepare(decoder(), format, **options)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for _ in range(2):
        model(tokens).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    if name == "evaluated":
        # the root stays whole after this
        with torch.no_grad():
            model(tokens)
    rt.qat.save(model, folder, layout=layout)
    # all processes find the files at once
    assert (folder / "config.json").is_file()
    assert rt.qat.status(model).layers[0].error > 0
    try:
        rt.qat.convert(model)
    except rt.InvalidInput as error:
        assert "is sharded, and FSDP would go on gathering" in str(error)
    else:
        raise AssertionError("converted")
    try:
        rt.qat.save(model, folder)
    except rt.InvalidInput as error:
        assert "is there already" in str(error)
    else:
        raise AssertionError("saved twice")
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.state_dict().items()}
    if rank == 0:
        torch.save(whole, folder / "whole.pt")


with warnings.catch_warnings():
    warnings.filterwarnings("error", message=".*returned a view tensor")
    found = {case: train(case) for case in CASES}
for name, words in SAVED.items():
    save(name, *words)
if rank == 0:
    Path(sys.argv[1], "found.json").write_text(json.dumps(found))
# a process that leaves while the other still reads its last message takes the connection, and the other aborts
dist.barrier()
time.sleep(0.5)
dist.destroy_process_group()
"""


# formats and options of `prepare`: masks of "refreshed" stay for two steps, and decays are seen in the loss
CASES = {
    "int4:32": ("int4:32", {}), "fp8": ("fp8", {}), "fp8_tile": ("fp8_tile", {}), "int8": ("int8", {}),
    "clip": ("mxfp4", {"estimator": "clip"}), "masked": (None, {"sparsity": rt.sparsity.Recipe(decay=5.0)}),
    "refreshed": (None, {"sparsity": rt.sparsity.Recipe(decay=5.0, refresh=2)}),
}  # fmt: skip


def prepared(case: str) -> torch.nn.Module:
    """The model of a case, as both processes and the one that they are compared with have it."""
    format, options = CASES[case]
    return rt.qat.prepare(mlp(), format, verbose=False, **options)


# folders, and the formats, options of `prepare` and the layout of their models
SAVED = {
    "straight": ({"*": "int4:32", "*.down": "int8"}, {}, "dense"),
    "lsq": ({"*.mixer.*": "int4:32", "*.up": "w8"}, {"estimator": "lsq"}, "dense"),
    "evaluated": ({"*.mixer.*": "nvfp4"}, {}, "dense"),
    "masked": ({"*.mixer.*": "int4:32", "*.up": None}, {"sparsity": rt.sparsity.Recipe()}, "dense"),
    "masked-lsq": ({"*.mixer.*": "int4:32"}, {"estimator": "lsq", "sparsity": rt.sparsity.Recipe()}, "dense"),
    "two_four": ({"*.mixer.*": "fp8", "*.up": None}, {"sparsity": rt.sparsity.Recipe(transposable=True)}, "two_four"),
}


class Ran(NamedTuple):
    """The results of one run of two processes."""

    found: dict[str, tuple[list[float], int]]  # the losses of all cases, and the steps that were counted
    folder: Path  # has a folder for each saved model


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("sharded")
    script = folder / "train.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return Ran(json.loads((folder / "found.json").read_text()), folder)


def test_sharded_models_are_saved(sharded: Ran) -> None:
    for name, (format, options, layout) in SAVED.items():
        saved = sharded.folder / name
        model = rt.qat.prepare(decoder(), format, **options)
        model.load_state_dict(torch.load(saved / "whole.pt"))
        rt.qat.save(model, saved / "due", layout=layout)
        found, due = (load_file(folder / "model.safetensors") for folder in (saved, saved / "due"))
        assert found.keys() == due.keys()
        assert any(key.endswith(("weight_packed", "weight_values")) for key in due)
        for key, x in due.items():
            assert torch.equal(found[key].view(torch.uint8), x.view(torch.uint8)), key
        sections = [(folder / "config.json").read_text() for folder in (saved, saved / "due")]
        assert sections[0] == sections[1]


@pytest.mark.parametrize("case", list(CASES))
def test_sharded_weights(sharded: Ran, case: str) -> None:
    found, steps = sharded.found[case]
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
