"""The kernels of targets' own pairs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt
from rooftile.recommend.hstu import hopper, kernels
from rooftile.recommend.hstu.kernels.own_pairs import add_own_gradients, add_own_outputs
from rooftile.recommend.hstu.problem import Problem, Users
from tests.recommend.hstu_cases import own_pairs


@pytest.mark.parametrize("scale", [None, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients(dtype: torch.dtype, scale: float | None) -> None:
    torch.manual_seed(0)
    lengths, targets = (70, 0, 5, 130), (3, 0, 5, 80)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    q, k, v, dy, y, *grads = (torch.randn(205, 2, 24).to(dtype) for _ in range(8))
    users, problem = Users(cu, torch.tensor(targets, dtype=torch.int32)), Problem(0.3, scale, rt.CAUSAL, 0, 0)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    due = own_pairs(*leaves, cu, targets, 0.3, scale)
    dq, dk, dv = torch.autograd.grad(due, leaves, dy.double())
    own = due.detach().abs().sum((1, 2)) > 0
    before = [x.double().clone() for x in (y, *grads)]
    add_own_outputs(y, q, k, v, users, problem)
    add_own_gradients(*grads, dy, q, k, v, users, problem)
    error = 1e-5 if dtype == torch.float32 else 2e-2
    wanted = (
        before[0] + due,
        before[1] + dq,
        torch.where(own[:, None, None], dk, before[2]),
        torch.where(own[:, None, None], dv, before[3]),
    )
    for found, exact in zip((y, *grads), wanted, strict=True):
        assert (found.double() - exact).abs().max() <= error * exact.abs().max()
    for found, earlier in zip((y, *grads), before, strict=True):
        assert torch.equal(found[~own].double(), earlier[~own])


@pytest.mark.parametrize("flag", [0, 1])
def test_users_without_rows_leave_what_is_there(flag: int) -> None:
    """The kernels that compute again where a NaN was met: unless the flag is set, no row is written."""
    torch.manual_seed(0)
    cu = torch.tensor([0, 70, 70, 205], dtype=torch.int32)
    q, k, v, dy = (torch.randn(205, 2, 32).bfloat16() for _ in range(4))
    users, problem = Users(cu, torch.tensor([2, 0, 70], dtype=torch.int32)), Problem(0.3, None, rt.CAUSAL, 0, 0)
    y, *grads = (torch.full_like(q, 7) for _ in range(4))
    again = hopper.users_if_set(torch.tensor([flag], dtype=torch.int32), users)
    kernels.forward(q, k, v, again, problem, y)
    kernels.backward(dy, q, k, v, again, problem, tuple(grads))
    due = (kernels.forward(q, k, v, users, problem), *kernels.backward(dy, q, k, v, users, problem)[:3])
    for found, exact in zip((y, *grads), due, strict=True):
        assert torch.equal(found, exact if flag else torch.full_like(q, 7))
