"""Why a backend of HSTU attention does not run a problem: one sentence each, or None."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.recommend.hstu.problem import Problem, Users
from rooftile.runtime.devices import arch, lack_of_gluon, lack_of_kernels

# the widest table of positions whose distances a tile holds in 32 bits
MOST_COLUMNS = 1 << 22
# the rows per user, and per user times all rows, from which the kernels for Hopper are faster than Triton's, on an H200
LONG, MANY = 1024, 1 << 26


def refusal_of_triton(q: Tensor, v: Tensor, users: Users, problem: Problem) -> str | None:
    """Says why Triton's kernels do not run such tensors."""
    if lack := lack_of_kernels(arch(q.device)):
        return lack
    if q.dtype == torch.float64:
        return "q is float64; has float32, bfloat16 and float16"
    if max(q.shape[2], v.shape[2]) > 256:
        return f"head dim is {q.shape[2]} for q and {v.shape[2]} for v; has up to 256"
    if users.positions is not None and users.position_table is not None and users.position_table.shape[1] > MOST_COLUMNS:
        return f"positions came with a table of {users.position_table.shape[1]:,} columns; has up to {MOST_COLUMNS:,}"
    if len(problem.mask.chunks) > 1:
        return f"mask {problem.mask}; has one chunk size"
    return None


def refusal_of_hopper(q: Tensor, v: Tensor, users: Users, problem: Problem) -> str | None:
    """Says why the kernels for Hopper do not run such tensors."""
    if (word := arch(q.device)) != "sm90":
        return f"tensors are on {word}; needs sm90 (Hopper)"
    if lack := lack_of_gluon():
        return lack
    if q.dtype != torch.bfloat16:
        return f"q is {str(q.dtype).removeprefix('torch.')}; has bfloat16"
    D = q.shape[2]
    if v.shape[2] != D or D % 8 or D > 128:
        return f"head dim is {D} for q and {v.shape[2]} for v; has one for both, a multiple of 8 up to 128"
    if users.position_table is not None or users.time_table is not None:
        return "a bias came; has none"
    if problem.contextual:
        return f"contextual is {problem.contextual}; has 0"
    mask = problem.mask
    if len(mask.chunks) > 1:
        return f"mask {mask}; has one chunk size"
    if users.targets is not None and (mask.left is not None or mask.chunks):
        return f"mask {mask} with targets; has them without a bound to the left"
    return None


def pays_on_hopper(q: Tensor, users: Users) -> bool:
    """Whether the kernels for Hopper are faster than Triton's: for long users, and enough of them to be worth their launches."""
    total, B = q.shape[0], max(users.cu.shape[0] - 1, 1)
    return total >= LONG * B and total * (total // B) >= MANY
