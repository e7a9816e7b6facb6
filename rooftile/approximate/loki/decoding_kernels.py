"""The scores of pages in kernels, and the choice of the best: the leading dims of the keys are read once, where they lie.

A program of the first has the heads of a group and some neighbouring pages of one sequence. It writes, per head and page, the
largest score and the sum of the exponentials relative to it. A program of the second knows the whole softmax of a group's heads,
and adds up their shares. One of the third has all pages of a sequence and key head in registers, and writes the chosen ones in
order.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.approximate.gathered.kernels.grouping import is_best
from rooftile.exact.backends.triton.scores import scaled_tanh
from rooftile.runtime.dependent_launch import overlaps, wait_for_inputs
from rooftile.runtime.launch import Kernel

# keys of a program, unless a page has more
KEYS = 128
# pages of a step over all of them
PAGES = 512
# pages that a program holds in registers
MOST_PAGES = 16384


# fmt: off
@triton.jit(
    do_not_specialize=["H", "N", "table_stride"], do_not_specialize_on_alignment=["table_ptr", "lengths_ptr"]
)
def _page_sums(
    q_ptr, leading_ptr, table_ptr, lengths_ptr, top_ptr, total_ptr, H, N, q_stride_b, q_stride_h,
    k_stride_p, k_stride_s, k_stride_h, table_stride, scale, softcap,
    GROUP: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, SIZE: tl.constexpr, PAGES: tl.constexpr,
    CAPPED: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Writes the largest score and the sum of exponentials of PAGES pages, for the heads of a group: (B, H, N) each."""
    if PDL:
        wait_for_inputs()
    # neighbours in time are the heads of a token, which are neighbours in memory
    h_k, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * PAGES
    length = tl.load(lengths_ptr + b)
    g, r = tl.arange(0, ROWS), tl.arange(0, BLOCK_R)
    page = first + tl.arange(0, PAGES)
    cell = (b * H + h_k * GROUP + g)[:, None] * N + page[None, :]
    in_bounds = (g < GROUP)[:, None] & (page < N)[None, :]
    if first * SIZE >= length:
        tl.store(top_ptr + cell, tl.full((ROWS, PAGES), float("-inf"), tl.float32), mask=in_bounds)
        tl.store(total_ptr + cell, tl.zeros((ROWS, PAGES), tl.float32), mask=in_bounds)
        return
    j = first * SIZE + tl.arange(0, PAGES * SIZE)
    seen = j < length
    block = tl.load(table_ptr + b * table_stride + j // SIZE, mask=seen, other=0).to(tl.int64)
    place = block * k_stride_p + j % SIZE * k_stride_s + h_k * k_stride_h
    k = tl.load(leading_ptr + place[:, None] + r[None, :], mask=seen[:, None] & (r < R)[None, :], other=0.0)
    rows = b * q_stride_b + (h_k * GROUP + g) * q_stride_h
    q = tl.load(q_ptr + rows[:, None] + r[None, :], mask=(g < GROUP)[:, None] & (r < R)[None, :], other=0.0)
    x = tl.dot(q, tl.trans(k), input_precision="ieee")
    x = scaled_tanh(x, scale, softcap) * softcap if CAPPED else x * scale
    x = tl.reshape(tl.where(seen[None, :], x, float("-inf")), (ROWS, PAGES, SIZE))
    top = tl.max(x, 2)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(x - pivot[:, :, None]), 2)
    tl.store(top_ptr + cell, top, mask=in_bounds)
    tl.store(total_ptr + cell, total, mask=in_bounds)


@triton.jit(do_not_specialize=["H", "N"])
def _page_shares(
    top_ptr, total_ptr, score_ptr, H, N, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Writes the sum of the softmax over each page and the heads of a group, (B, Hk, N), from what `_page_sums` wrote."""
    if PDL:
        wait_for_inputs()
    h_k, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    g = tl.arange(0, ROWS)
    lines = (b * H + h_k * GROUP + g)[:, None] * N
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    for first in range(0, N, BLOCK):
        n = first + tl.arange(0, BLOCK)
        there = (g < GROUP)[:, None] & (n < N)[None, :]
        top = tl.load(top_ptr + lines + n[None, :], mask=there, other=float("-inf"))
        total = tl.load(total_ptr + lines + n[None, :], mask=there, other=0.0)
        m_new = tl.maximum(m, tl.max(top, 1))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.exp(m - pivot) + tl.sum(total * tl.exp(top - pivot[:, None]), 1)
        m = m_new
    pivot = tl.where(m == float("-inf"), 0.0, m)
    # a row that pads a step has no keys
    l = tl.where(l == 0.0, 1.0, l)
    out = score_ptr + (b * (H // GROUP) + h_k) * N
    for first in range(0, N, BLOCK):
        n = first + tl.arange(0, BLOCK)
        there = (g < GROUP)[:, None] & (n < N)[None, :]
        top = tl.load(top_ptr + lines + n[None, :], mask=there, other=float("-inf"))
        total = tl.load(total_ptr + lines + n[None, :], mask=there, other=0.0)
        share = total * tl.exp(top - pivot[:, None]) / l[:, None]
        tl.store(out + n, tl.sum(share, 0), mask=n < N)


@triton.jit(do_not_specialize=["Hk", "N", "most"])
def _choose(score_ptr, count_ptr, pages_ptr, out_ptr, Hk, N, most, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Writes the places of the best scores of a sequence and key head, rising, and N after them: (B, Hk, most).

    A sequence has `pages` pages, of which `count` are chosen; the last one always is.
    """
    if PDL:
        wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    pages, count = tl.load(pages_ptr + row // Hk), tl.load(count_ptr + row // Hk)
    n = tl.arange(0, BLOCK)
    score = tl.load(score_ptr + row * N + n, mask=n < pages, other=0.0)
    kept = is_best(tl.where(n == pages - 1, float("inf"), score), n, pages, count)
    at = tl.cumsum(kept.to(tl.int32), 0) - 1
    out = out_ptr + row * most
    tl.store(out + at, n, mask=kept & (at < count))
    tl.store(out + n, tl.full((BLOCK,), 0, tl.int32) + N, mask=(n >= count) & (n < most))


_start_page_sums, _start_page_shares, _start_choose = Kernel(_page_sums), Kernel(_page_shares), Kernel(_choose)


def page_scores(
    q: Tensor, leading: Tensor, table: Tensor, lengths: Tensor, scale: float, softcap: float | None
) -> Tensor:  # fmt: skip
    """Returns the scores of pages (B, Hk, N), fp32, from q (B, H, r or more) and leading dims (P, size, Hk, r)."""
    (B, H), N = q.shape[:2], table.shape[1]
    size, Hk, r = leading.shape[1:]
    q, table = q if q.stride(2) == 1 else q.contiguous(), table if table.stride(1) == 1 else table.contiguous()
    top, total = torch.empty(2, B, H, N, dtype=torch.float32, device=q.device)
    scores = torch.empty(B, Hk, N, dtype=torch.float32, device=q.device)
    if B and N:
        constants = constants_of(H // Hk, r, size, softcap is not None, q.device)
        arguments = (
            q, leading, table, lengths, top, total, H, N, *q.stride()[:2], *leading.stride()[:3], table.stride(0), scale,
            1.0 if softcap is None else softcap,
        )  # fmt: skip
        _start_page_sums((Hk, triton.cdiv(N, constants["PAGES"]), B), arguments, constants)
        _start_page_shares((Hk, B, 1), (top, total, scores, H, N), shares_of(H // Hk, q.device))
    return scores


def choose(scores: Tensor, counts: Tensor, pages: Tensor, most: int) -> Tensor:
    """Returns the chosen pages (B, Hk, most) int32, rising, and N after them, from scores (B, Hk, N), and (B,) int32 each."""
    B, Hk, N = scores.shape
    out = torch.empty(B, Hk, most, dtype=torch.int32, device=scores.device)
    if out.numel():
        constants = chooses(triton.next_power_of_2(N), scores.device)
        _start_choose((B * Hk, 1, 1), (scores.contiguous(), counts, pages, out, Hk, N, most), constants)
    return out


@cache
def shares_of(group: int, device: torch.device) -> dict[str, int]:
    """Returns the compile-time arguments of `_page_shares`."""
    return {"GROUP": group, "ROWS": triton.next_power_of_2(group), "BLOCK": PAGES, "num_warps": 8} | overlaps(device)


@cache
def chooses(block: int, device: torch.device) -> dict[str, int]:
    """Returns the compile-time arguments of `_choose`."""
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 32)} | overlaps(device)


@cache
def constants_of(group: int, r: int, size: int, capped: bool, device: torch.device) -> dict[str, int]:
    """Returns the compile-time arguments of the kernel; a matrix product takes at least 16 rows and columns."""
    return {
        "GROUP": group, "ROWS": max(triton.next_power_of_2(group), 16), "R": r, "BLOCK_R": max(triton.next_power_of_2(r), 16),
        "SIZE": size, "PAGES": max(KEYS // size, 1), "CAPPED": capped, "num_warps": 4, **overlaps(device),
    }  # fmt: skip
