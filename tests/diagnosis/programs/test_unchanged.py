"""A program is as it was after its step was run many times."""

from __future__ import annotations

import random
import subprocess
import sys
from copy import deepcopy
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from rooftile.diagnosis.programs.unchanged import state_of, unchanged


def training() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 1))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(11, 5)

    def step() -> None:
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()

    return model, optimiser, step


def everything(model: nn.Module, optimiser: torch.optim.Optimizer) -> list[Any]:
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [deepcopy(model.state_dict()), gradients, deepcopy(optimiser.state_dict()), [m.training for m in model.modules()]]


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("how", ["ends", "raises", "interrupted"])
def test_a_training_step(steps_before: int, how: str) -> None:
    model, optimiser, step = training()
    for _ in range(steps_before):
        step()
    before = everything(model, optimiser)
    ending = {"raises": ValueError, "interrupted": KeyboardInterrupt}.get(how)

    def block() -> None:
        with unchanged(state_of(step, ())):
            for _ in range(3):
                step()
            model.eval()
            if ending is not None:
                raise ending

    if ending is None:
        block()
    else:
        with pytest.raises(ending):
            block()
    assert_same(everything(model, optimiser), before)
    # and it goes on as if nothing had happened
    torch.manual_seed(0)
    step()


def test_random_numbers_and_flags_go_on_where_they_were() -> None:
    torch.manual_seed(3)
    numpy.random.seed(3)
    random.seed(3)
    due = torch.rand(4), numpy.random.rand(), random.random()
    torch.manual_seed(3)
    numpy.random.seed(3)
    random.seed(3)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    with unchanged([]):
        torch.rand(9), numpy.random.rand(), random.random()
        torch.set_num_threads(threads + 1)
        torch.set_default_dtype(torch.float64)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == dtype
    assert torch.equal(torch.rand(4), due[0])
    assert (numpy.random.rand(), random.random()) == due[1:]


def test_tensors_and_views_keep_their_place() -> None:
    x, w = torch.zeros(4), torch.ones(3, requires_grad=True)
    w.grad = torch.full((3,), 2.0)
    gradient, view = w.grad, x[1:3]
    with unchanged([x, w]):
        x.add_(1)
        (w * 3).sum().backward()
        w.grad = None
    assert (x == 0).all()
    assert (view == 0).all()
    assert w.grad is gradient
    assert (gradient == 2).all()


def test_state_is_found_where_code_names_it() -> None:
    model, _optimiser, step = training()
    held = state_of(step, (torch.ones(2),))
    assert {type(x) for x in held} == {nn.Sequential, torch.optim.AdamW, torch.Tensor}
    assert state_of(model, ()) == [model]
    assert state_of(model.forward, ())[0] is model


def test_state_is_found_behind_partial_functions_containers_and_other_functions() -> None:
    model, optimiser, step = training()
    numbers = torch.Generator()
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, 1)

    class Trainer:
        def __init__(self) -> None:
            self.parts = {"model": model, "schedules": [schedule]}

        def step(self) -> None:
            helper()

    def helper() -> None:
        step()
        torch.rand(2, generator=numbers)

    expected = [model, optimiser, schedule, numbers]
    for function in (Trainer().step, partial(Trainer.step, Trainer()), lambda: Trainer().step()):
        held = state_of(function, ())
        assert [type(one) for one in expected if not any(one is x for x in held)] == []
    batch = {"x": torch.ones(3), "more": [torch.ones(2)]}
    assert {x.numel() for x in state_of(len, (batch,))} == {3, 2}


def test_schedules_scalers_and_generators_go_on_where_they_were() -> None:
    _model, optimiser, step = training()
    schedule, numbers = torch.optim.lr_scheduler.StepLR(optimiser, 1), torch.Generator()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    drawn = torch.rand(3, generator=numbers.clone_state())
    with unchanged([optimiser, schedule, scaler, numbers]):
        step()
        schedule.step()
        scaler.scale(torch.ones(1))
        scaler.update(2.0)
        torch.rand(9, generator=numbers)
    assert schedule.last_epoch == 0
    assert optimiser.param_groups[0]["lr"] == 0.1
    assert scaler.get_scale() == 8.0
    assert torch.equal(torch.rand(3, generator=numbers), drawn)


def test_a_program_may_say_the_precision_of_products_in_either_way() -> None:
    script = """
import torch
from rooftile.diagnosis.programs.unchanged import unchanged
torch.backends.cuda.matmul.fp32_precision = "tf32"
with unchanged([]):
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cuda.enable_flash_sdp(False)
    torch.set_autocast_enabled("cpu", True)
print(torch.backends.cuda.matmul.fp32_precision, torch.backends.cuda.flash_sdp_enabled(), torch.is_autocast_enabled("cpu"))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["tf32", "True", "False"]
