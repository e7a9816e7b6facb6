"""Tokens sorted by expert in one launch, where there are few: the launches of a general sort take longer than reading weights.

Each row counts the rows in front of it, and each expert the rows of lower experts: rows squared comparisons, and no sum of two
programs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.moe import sorting
from rooftile.runtime.launch import Kernel

# rows up to which comparing each with each is faster than a general sort
_FEW = 4096
_BLOCK, _CHUNK = 32, 128


# fmt: off
@triton.jit(do_not_specialize=["ROWS"])
def _rank(
    chosen_ptr, order_ptr, tokens_ptr, experts_ptr, bounds_ptr, ROWS,
    E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):
    # fmt: on
    """Writes `Sorted` of the choices (ROWS / K, K). After the rows stand E + 1 questions: how many choices are below expert e."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = i < ROWS
    expert = tl.where(is_row, tl.load(chosen_ptr + i, mask=is_row, other=0), i - ROWS)
    # an equal choice counts where it comes first, and never for a question
    limit = tl.where(is_row, i, 0)
    rank = tl.zeros((BLOCK,), tl.int32)
    for c in range(0, ROWS, CHUNK):
        j = c + tl.arange(0, CHUNK)
        other = tl.load(chosen_ptr + j, mask=j < ROWS, other=2147483647)
        is_first = (other[None, :] == expert[:, None]) & (j[None, :] < limit[:, None])
        rank += tl.sum(((other[None, :] < expert[:, None]) | is_first).to(tl.int32), 1)
    tl.store(order_ptr + rank, i.to(tl.int64), mask=is_row)
    tl.store(tokens_ptr + rank, (i // K).to(tl.int64), mask=is_row)
    tl.store(experts_ptr + rank, expert, mask=is_row)
    tl.store(bounds_ptr + (i - ROWS), rank, mask=(i >= ROWS) & (i <= ROWS + E))


_start_rank = Kernel(_rank)


@cache
def _constants(E: int, K: int) -> dict[str, Any]:
    return {"E": E, "K": K, "BLOCK": _BLOCK, "CHUNK": _CHUNK, "num_warps": 4}


def sort(chosen: Tensor, count: int) -> sorting.Sorted:
    """Sorts the choices (N, K), int32, of tokens among `count` experts."""
    rows, device = chosen.numel(), chosen.device
    if not 0 < rows <= _FEW:
        return sorting.sort(chosen, count)
    order, tokens = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    experts, bounds = (torch.empty(n, dtype=torch.int32, device=device) for n in (rows, count + 1))
    grid = (triton.cdiv(rows + count + 1, _BLOCK), 1, 1)
    _start_rank(grid, (chosen.contiguous(), order, tokens, experts, bounds, rows), _constants(count, chosen.shape[1]))
    return sorting.Sorted(order, tokens, experts, bounds)
