"""Triton kernels of HSTU attention."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.recommend.hstu.kernels import outputs
from rooftile.recommend.hstu.kernels.gradients_of_keys import gradients_of_keys
from rooftile.recommend.hstu.kernels.gradients_of_rows import gradients_of_rows
from rooftile.recommend.hstu.problem import Problem, Users
from rooftile.recommend.hstu.tiled import Gradients


def forward(q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem, y: Tensor | None = None) -> Tensor:
    """Returns y (total, H, Dv); writes it into a tensor that is given."""
    return outputs.forward(*(rows(x) for x in (q, k, v)), _shortened(users), problem, y)


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, users: Users, problem: Problem,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Gradients:  # fmt: skip
    """Returns the gradients of y's inputs, of tables in fp32; writes dq, dk and dv into tensors that are given."""
    dy, q, k, v = (rows(x) for x in (dy, q, k, v))
    users = _shortened(users)
    dq, dk, dv = grads or (x.new_empty(x.shape) for x in (q, k, v))
    d_positions, d_times = gradients_of_rows(dq, dy, q, k, v, users, problem)
    gradients_of_keys(dk, dv, dy, q, k, v, users, problem)
    return Gradients(dq, dk, dv, d_positions, d_times)


def _shortened(users: Users) -> Users:
    """Returns users whose positions have no gap wider than the table, beyond which distances have one column.

    So the positions of a tile's rows differ by what 32 bits hold.
    """
    if users.positions is None or users.position_table is None or not users.positions.numel():
        return users
    steps = users.positions.diff().clamp(0, users.position_table.shape[1])
    return users._replace(positions=torch.cat([steps.new_zeros(1), steps.cumsum(0)]))


def rows(x: Tensor) -> Tensor:
    """x, or a copy whose last axis is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
