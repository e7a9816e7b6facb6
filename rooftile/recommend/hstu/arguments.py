"""The checks of a call of `hstu_attention`: from what a caller gives to tensors and a problem, or one sentence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.exact.masks import FULL, Mask
from rooftile.exact.validate import PACKED, check_tensors
from rooftile.recommend.hstu.bias import RelativeBias
from rooftile.recommend.hstu.problem import Problem, Users
from rooftile.runtime.arguments import check_count, check_number, shown, whole
from rooftile.runtime.tensors import autocast, check_offsets

INTEGERS = (torch.int32, torch.int64)


def check_call(
    q: Any, k: Any, v: Any, cu: Any, alpha: Any, mask: Any, bias: Any, times: Any, positions: Any, contextual: Any, targets: Any,
    scale: Any,
) -> tuple[Tensor, Tensor, Tensor, Users, Problem]:  # fmt: skip
    """Returns q, k and v in autocast's dtype if it is on, the other tensors, and the numbers."""
    if isinstance(q, Tensor) and not q.is_meta and torch.is_autocast_enabled(q.device.type):
        q, k, v = (autocast(x) for x in (q, k, v))
    check_tensors(q, k, v, PACKED)
    if k.shape != q.shape:
        raise InvalidInput(f"k is {tuple(k.shape)}; q is {tuple(q.shape)}, and both have the same rows and heads")
    mask = FULL if mask is None else mask
    if not isinstance(mask, Mask):
        raise InvalidInput(f"mask is {shown(mask)}; must be a mask such as rooftile.CAUSAL, or None")
    cu = check_offsets("cu", cu, q.shape[0], "rows", q.device, False)
    contextual = check_count("contextual", contextual, 0)
    targets = _check_targets(_targets_of(mask, targets), cu)
    mask = mask.over_history
    users = Users(cu, targets)
    problem = Problem(check_number("alpha", alpha), None if scale is None else check_number("scale", scale), mask, contextual, 0)
    _check_lengths(users, contextual)
    return q, k, v, *with_bias(q, users, problem, bias, times, positions)


def _targets_of(mask: Mask, targets: Any) -> Any:
    """The targets, which the mask may say, or the argument, or both alike."""
    if not mask.targets:
        return targets
    if targets is not None and (isinstance(targets, Tensor) or whole(targets) != mask.targets):
        raise InvalidInput(f"mask is {mask!r} and targets is {shown(targets)}; must be the same number, or one of them left out")
    return mask.targets


def _check_targets(targets: Any, cu: Tensor) -> Tensor | None:
    """The number of targets of each user, on the device of the offsets."""
    B = cu.shape[0] - 1
    if targets is None:
        return None
    if isinstance(targets, Tensor) and targets.ndim:
        if targets.shape != (B,) or targets.dtype not in INTEGERS:
            raise InvalidInput(f"targets is {shown(targets)}; must be an int, or int32 or int64 of shape ({B},)")
        return targets.to(cu.device, cu.dtype, non_blocking=True).contiguous()
    number = whole(targets)
    if number is None or number < 0:
        raise InvalidInput(f"targets is {shown(targets)}; must be an int of at least 0, or a tensor ({B},), a number per user")
    # a user without rows has no target
    return torch.where(cu.diff() > 0, number, 0).to(cu.dtype) if number else None


def _check_lengths(users: Users, contextual: int) -> None:
    """Checks that a user's contextual rows and targets are not more than its rows, where the numbers lie on the host."""
    if users.cu.is_cpu and not torch.compiler.is_compiling():
        rows = users.cu.diff()
        targets = torch.zeros_like(rows) if users.targets is None else users.targets
        if bool((targets < 0).any()):
            raise InvalidInput(f"targets has {int(targets.min())}; must be at least 0")
        many = (rows > 0) & (targets + contextual > rows) | (targets > rows)
        if bool(many.any()):
            b = int(many.nonzero()[0])
            raise InvalidInput(
                f"user {b} has {int(rows[b])} rows; contextual is {contextual} and targets {int(targets[b])}, together more"
            )


def with_bias(q: Tensor, users: Users, problem: Problem, bias: Any, times: Any, positions: Any) -> tuple[Users, Problem]:
    """The tensors and numbers of a call with its bias."""
    if bias is None:
        for name, given in (("times", times), ("positions", positions)):
            if given is not None:
                raise InvalidInput(f"{name} came without a bias; give bias=RelativeBias({name}=table), or leave {name} out")
        return users, problem
    if not isinstance(bias, RelativeBias):
        raise InvalidInput(f"bias is {shown(bias)}; must be a rooftile.recommend.RelativeBias, whose tables every pair reads")
    position_table, time_table = _check_table("positions", bias.positions, q), _check_table("times", bias.times, q)
    if position_table is None and positions is not None:
        raise InvalidInput("positions came, and bias has no table of positions; give RelativeBias(positions=table)")
    zero = check_count("zero", bias.zero, 0)
    if position_table is None and zero:
        raise InvalidInput(f"zero is {zero}, and bias has no table of positions; give RelativeBias(positions=table, zero={zero})")
    if position_table is not None and zero >= position_table.shape[1]:
        raise InvalidInput(f"zero is {zero}; bias.positions has {position_table.shape[1]} columns, and zero is one of them")
    row_times = key_times = edges = None
    if time_table is not None:
        if times is None:
            raise InvalidInput("bias has a table of times, and times is None; give times, whole seconds per row")
        row_times, key_times = _check_times(times, users)
        edges = check_edges(bias.edges, time_table.shape[1], q.device)
    elif times is not None or bias.edges is not None:
        raise InvalidInput("times or edges came, and bias has no table of times; give RelativeBias(times=table, edges=edges)")
    if positions is not None:
        positions = _check_per_row("positions", positions, users)
    return (
        Users(users.cu, users.targets, position_table, time_table, edges, row_times, key_times, positions),
        problem._replace(zero=zero),
    )


def _check_table(name: str, table: Any, q: Tensor) -> Tensor | None:
    """A table as (1|H, columns)."""
    if table is None:
        return None
    if not isinstance(table, Tensor) or not table.is_floating_point() or table.ndim not in (1, 2) or not table.shape[-1]:
        raise InvalidInput(f"bias.{name} is {shown(table)}; must be a float tensor (columns,) or (1|{q.shape[1]}, columns)")
    if table.ndim == 2 and table.shape[0] not in (1, q.shape[1]):
        raise InvalidInput(f"bias.{name} is {tuple(table.shape)}; must have 1 row, or one for each of {q.shape[1]} heads")
    if table.device != q.device:
        raise InvalidInput(f"bias.{name} is on {table.device}; q is on {q.device}, and all inputs must be on one device")
    return table if table.ndim == 2 else table[None]


def check_edges(edges: Any, buckets: int, device: torch.device) -> Tensor:
    """The first second of each bucket but the first."""
    if not isinstance(edges, Tensor) or edges.ndim != 1 or edges.dtype not in INTEGERS:
        raise InvalidInput(f"bias.edges is {shown(edges)}; must be an int64 tensor ({buckets - 1},): see time_edges")
    if edges.shape[0] != buckets - 1:
        raise InvalidInput(
            f"bias.edges makes {edges.shape[0] + 1} buckets, and bias.times has {buckets} columns; must be one column per bucket"
        )
    if edges.is_cpu and not torch.compiler.is_compiling() and bool((edges.diff() < 0).any()):
        raise InvalidInput("bias.edges falls somewhere; no edge may be below the one before")
    if edges.is_cpu and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InvalidInput("bias.edges is on the CPU, which a CUDA graph cannot copy from; give bias.edges.to(q.device)")
    return edges.to(device, torch.int64, non_blocking=True).contiguous()


def _check_times(times: Any, users: Users) -> tuple[Tensor, Tensor]:
    """The seconds of rows as queries and as keys."""
    pair = tuple(times) if isinstance(times, (tuple, list)) else (times, times)
    if len(pair) != 2:
        raise InvalidInput(f"times is {len(pair)} things; must be a tensor, or a pair: of rows as queries, and as keys")
    row_times, key_times = (_check_per_row("times", x, users) for x in pair)
    return row_times, key_times


def _check_per_row(name: str, x: Any, users: Users) -> Tensor:
    """A number per row that never falls within a user."""
    if not isinstance(x, Tensor) or x.ndim != 1 or x.dtype not in INTEGERS:
        raise InvalidInput(f"{name} is {shown(x)}; must be int32 or int64 (total,), a number per row")
    total = int(users.cu[-1]) if users.cu.is_cpu and not torch.compiler.is_compiling() else None
    if total is not None and x.shape[0] != total:
        raise InvalidInput(f"{name} has {x.shape[0]} rows; q has {total}")
    if x.is_cpu and total:
        falls = x.diff() < 0
        # between two users it may
        borders = users.cu[1:-1].long() - 1
        falls[borders[(borders >= 0) & (borders < total - 1)]] = False
        if bool(falls.any()):
            row = int(falls.nonzero()[0]) + 1
            raise InvalidInput(f"{name} falls at row {row}, from {int(x[row - 1])} to {int(x[row])}; must rise within a user")
    return x.to(users.cu.device, torch.int64, non_blocking=True).contiguous()
