"""The scores of pages in a kernel: the leading dims of the keys are read once, where they lie, and no score is written.

A program has the heads of a group and some neighbouring pages of one sequence. It writes, per head and page, the largest score
and the sum of the exponentials relative to it: page sums of a softmax whose whole is known once all programs are done.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.backends.triton.scores import scaled_tanh
from rooftile.launch import Kernel

# keys of a program, unless a page has more
KEYS = 128


# fmt: off
@triton.jit(
    do_not_specialize=["H", "N", "table_stride"], do_not_specialize_on_alignment=["table_ptr", "lengths_ptr"]
)
def _page_sums(
    q_ptr, leading_ptr, table_ptr, lengths_ptr, top_ptr, total_ptr, H, N, q_stride_b, q_stride_h,
    k_stride_p, k_stride_s, k_stride_h, table_stride, scale, softcap,
    GROUP: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, SIZE: tl.constexpr, PAGES: tl.constexpr,
    CAPPED: tl.constexpr,
):
    # fmt: on
    """Writes the largest score and the sum of exponentials of PAGES pages, for the heads of a group: (B, H, N) each."""
    h_k, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * PAGES
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


_start_page_sums = Kernel(_page_sums)


def page_scores(
    q: Tensor, leading: Tensor, table: Tensor, lengths: Tensor, scale: float, softcap: float | None
) -> Tensor:  # fmt: skip
    """Returns the scores of pages (B, Hk, N), fp32, from q (B, H, r or more) and leading dims (P, size, Hk, r)."""
    (B, H), N = q.shape[:2], table.shape[1]
    size, Hk, r = leading.shape[1:]
    q, table = q if q.stride(2) == 1 else q.contiguous(), table if table.stride(1) == 1 else table.contiguous()
    top, total = torch.empty(2, B, H, N, dtype=torch.float32, device=q.device)
    if B and N:
        constants = constants_of(H // Hk, r, size, softcap is not None)
        arguments = (
            q, leading, table, lengths, top, total, H, N, *q.stride()[:2], *leading.stride()[:3], table.stride(0), scale,
            1.0 if softcap is None else softcap,
        )  # fmt: skip
        _start_page_sums((triton.cdiv(N, constants["PAGES"]), Hk, B), arguments, constants)
    whole = top.amax(-1, keepdim=True)
    share = total * torch.exp(top - torch.where(whole == -torch.inf, 0.0, whole))
    # a row that pads a step has no keys
    share = share / share.sum(-1, keepdim=True).clamp(min=1e-30)
    return share.unflatten(1, (Hk, -1)).sum(2)


def constants_of(group: int, r: int, size: int, capped: bool) -> dict[str, int]:
    """Returns what the kernel is compiled for; a matrix product takes at least 16 rows and columns."""
    return {
        "GROUP": group, "ROWS": max(triton.next_power_of_2(group), 16), "R": r, "BLOCK_R": max(triton.next_power_of_2(r), 16),
        "SIZE": size, "PAGES": max(KEYS // size, 1), "CAPPED": capped, "num_warps": 4,
    }  # fmt: skip
