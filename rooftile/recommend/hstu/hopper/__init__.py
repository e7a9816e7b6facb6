"""Hopper kernels of HSTU attention without tables, and the Triton kernels that finish what they leave."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.recommend.hstu import kernels
from rooftile.recommend.hstu.hopper import launch
from rooftile.recommend.hstu.kernels.own_pairs import add_own_gradients, add_own_outputs
from rooftile.recommend.hstu.problem import Problem, Users
from rooftile.recommend.hstu.tiled import Gradients


def forward(q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem) -> Tensor:
    """Returns y (total, H, D)."""
    if not q.numel():
        return v.new_empty(v.shape)
    nan_flag = torch.zeros(1, dtype=torch.int32, device=q.device)
    y = launch.forward(q, k, v, users, problem, nan_flag)
    if users.targets is not None:
        add_own_outputs(y, *(kernels.rows(x) for x in (q, k, v)), users, problem)
    kernels.forward(q, k, v, users_if_set(nan_flag, users), problem, y)
    return y


def backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem) -> Gradients:
    """Returns the gradients of y's inputs."""
    if not q.numel():
        return Gradients(*(x.new_empty(x.shape) for x in (q, k, v)), None, None)
    nan_flag = torch.zeros(1, dtype=torch.int32, device=q.device)
    grads = launch.backward(dy, q, k, v, users, problem, nan_flag)
    if users.targets is not None:
        add_own_gradients(*grads, *(kernels.rows(x) for x in (dy, q, k, v)), users, problem)
    return kernels.backward(dy, q, k, v, users_if_set(nan_flag, users), problem, grads)


def users_if_set(nan_flag: Tensor, users: Users) -> Users:
    """The users if the flag is set, and otherwise users without rows, for whom a kernel does nothing.

    A hidden NaN has come through a weight of zero then. Triton's kernels read no hidden pair: they compute everything again.
    """
    return users._replace(cu=torch.where(nan_flag != 0, users.cu, 0))
