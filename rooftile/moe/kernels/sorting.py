"""Tokens sorted by expert, by counting: one launch for few rows, three for many.

Each block of rows counts its experts, the counts are added up over blocks, and then each block knows where its first row of each
expert goes. Few rows are one block, which counts itself. A choice that is no expert has no place, and no kernel reads it: places
behind the last expert's rows stay as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.moe.sorting import Sorted
from rooftile.runtime.launch import Kernel

# rows of a block, and the most rows that one program sorts in one launch
_BLOCK, _FEW = 256, 1024
# numbers of a step: rows times experts
_STEP = 8192
# the blocks and experts of a step of the sums over blocks
_BLOCKS, _EXPERTS = 128, 16


@triton.jit
def _here(chosen_ptr, i, stop, e):
    """The choices of rows i, and a row of ones and zeros by expert for each of them."""
    chosen = tl.load(chosen_ptr + i, mask=i < stop, other=-1)
    return chosen, (chosen[:, None] == e[None, :]).to(tl.int32)


# fmt: off
@triton.jit(do_not_specialize=["ROWS"])
def _count_rows(
    chosen_ptr, counts_ptr, ROWS, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):
    # fmt: on
    """The rows of each expert in each block (blocks, E)."""
    e = tl.arange(0, BLOCK_E)
    count = tl.zeros((BLOCK_E,), tl.int32)
    for c in range(0, BLOCK, CHUNK):
        _, here = _here(chosen_ptr, tl.program_id(0) * BLOCK + c + tl.arange(0, CHUNK), ROWS, e)
        count += tl.sum(here, 0)
    tl.store(counts_ptr + tl.program_id(0) * E + e, count, mask=e < E)


@triton.jit(do_not_specialize=["COUNTED"])
def _add_counts(counts_ptr, totals_ptr, COUNTED, E: tl.constexpr, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr):
    """Puts the rows in earlier blocks in the place of each count, and writes the rows of each expert (E,)."""
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, COUNTED, BLOCKS):
        b = first + tl.arange(0, BLOCKS)
        place, mask = b[:, None] * E + e[None, :], (b < COUNTED)[:, None] & (e < E)[None, :]
        counts = tl.load(counts_ptr + place, mask=mask, other=0)
        tl.store(counts_ptr + place, total[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + e, total, mask=e < E)


# fmt: off
@triton.jit(do_not_specialize=["ROWS"])
def _place_rows(
    chosen_ptr, counts_ptr, totals_ptr, order_ptr, tokens_ptr, experts_ptr, bounds_ptr, ROWS,
    E: tl.constexpr, K: tl.constexpr, COUNTED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):
    # fmt: on
    """Writes `Sorted` of the choices (ROWS / K, K). If they are not COUNTED, there is one block, which counts its rows."""
    block = tl.program_id(0)
    stop = tl.minimum((block + 1) * BLOCK, ROWS)
    e = tl.arange(0, BLOCK_E)
    if COUNTED:
        place = tl.load(counts_ptr + block * E + e, mask=e < E, other=0)
        total = tl.load(totals_ptr + e, mask=e < E, other=0)
    else:
        place = tl.zeros((BLOCK_E,), tl.int32)
        total = tl.zeros((BLOCK_E,), tl.int32)
        for c in range(0, stop, CHUNK):
            _, here = _here(chosen_ptr, c + tl.arange(0, CHUNK), stop, e)
            total += tl.sum(here, 0)
    ends = tl.cumsum(total, 0)
    if block == 0:
        tl.store(bounds_ptr + e, ends - total, mask=e < E)
        tl.store(bounds_ptr + e + 1, ends, mask=e == E - 1)
    place += ends - total
    for c in range(block * BLOCK, stop, CHUNK):
        i = c + tl.arange(0, CHUNK)
        chosen, here = _here(chosen_ptr, i, stop, e)
        row = tl.sum(here * (place[None, :] + tl.cumsum(here, 0) - 1), 1)
        is_expert = (chosen >= 0) & (chosen < E)
        tl.store(order_ptr + row, i.to(tl.int64), mask=is_expert)
        tl.store(tokens_ptr + row, (i // K).to(tl.int64), mask=is_expert)
        tl.store(experts_ptr + row, chosen, mask=is_expert)
        place += tl.sum(here, 0)


_start_count, _start_adding, _start_placing = Kernel(_count_rows), Kernel(_add_counts), Kernel(_place_rows)


@cache
def count_constants(E: int) -> dict[str, Any]:
    block_e = triton.next_power_of_2(E)
    return {"E": E, "BLOCK_E": block_e, "BLOCK": _BLOCK, "CHUNK": min(max(_STEP // block_e, 16), _BLOCK), "num_warps": 8}


@cache
def adding_constants(E: int) -> dict[str, Any]:
    return {"E": E, "BLOCKS": _BLOCKS, "EXPERTS": _EXPERTS, "num_warps": 4}


@cache
def place_constants(E: int, K: int, few: int | None = None) -> dict[str, Any]:
    """With `few`, a power of two, one block holds all rows."""
    constants = {**count_constants(E), "K": K, "COUNTED": few is None}
    if few is not None:
        constants |= {"BLOCK": few, "CHUNK": max(min(constants["CHUNK"], few), 16), "num_warps": 4}
    return constants


def sort(chosen: Tensor, E: int) -> Sorted:
    """Sorts the choices (N, K), int32, of tokens among E experts."""
    chosen, rows = chosen.contiguous(), chosen.numel()
    order, tokens = (torch.empty(rows, dtype=torch.int64, device=chosen.device) for _ in range(2))
    experts, bounds = (torch.empty(n, dtype=torch.int32, device=chosen.device) for n in (rows, E + 1))
    if not rows:
        return Sorted(order, tokens, experts, bounds.zero_())
    blocks, counts, totals, few = 1, bounds, bounds, triton.next_power_of_2(rows)
    if rows > _FEW:
        few = None
        blocks = triton.cdiv(rows, _BLOCK)
        counts, totals = (torch.empty(size, dtype=torch.int32, device=chosen.device) for size in ((blocks, E), (E,)))
        _start_count((blocks, 1, 1), (chosen, counts, rows), count_constants(E))
        _start_adding((triton.cdiv(E, _EXPERTS), 1, 1), (counts, totals, blocks), adding_constants(E))
    arguments = chosen, counts, totals, order, tokens, experts, bounds, rows
    _start_placing((blocks, 1, 1), arguments, place_constants(E, chosen.shape[1], few))
    return Sorted(order, tokens, experts, bounds)
