"""FlashAttention-1's schedule: one program per head, keys and values in the outer loop, queries in the inner one.

Output, maximum and sum of every row go to memory and come back once a block of keys, and the output is kept normalised all the
way. Dao et al., FlashAttention, arXiv:2205.14135, Algorithm 1. Lengths are multiples of 128.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


# fmt: off
@triton.jit
def first(
    q_ptr, k_ptr, v_ptr, o_ptr, m_ptr, l_ptr, stride_b, stride_t, stride_h, H, T, factor,
    D: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):
    # fmt: on
    b = tl.program_id(0) // H
    h = tl.program_id(0) % H
    head = b.to(tl.int64) * stride_b + h * stride_h
    d = tl.arange(0, D)
    rows = tl.arange(0, BLOCK)
    tile = rows[:, None] * stride_t + d[None, :]
    m_head = m_ptr + tl.program_id(0).to(tl.int64) * T
    l_head = l_ptr + tl.program_id(0).to(tl.int64) * T
    for j in range(0, T, BLOCK):
        k = tl.load(k_ptr + head + j * stride_t + tile)
        v = tl.load(v_ptr + head + j * stride_t + tile)
        start = j if CAUSAL else 0
        for i in range(start, T, BLOCK):
            q = tl.load(q_ptr + head + i * stride_t + tile)
            s = tl.dot(q, tl.trans(k)) * factor
            if CAUSAL:
                s = tl.where((j + rows)[None, :] <= (i + rows)[:, None], s, float("-inf"))
            m = tl.load(m_head + i + rows)
            l = tl.load(l_head + i + rows)
            o = tl.load(o_ptr + head + i * stride_t + tile).to(tl.float32)
            m_block = tl.max(s, 1)
            p = tl.exp2(s - m_block[:, None])
            m_new = tl.maximum(m, m_block)
            before = l * tl.exp2(m - m_new)
            share = tl.exp2(m_block - m_new)
            l_new = before + share * tl.sum(p, 1)
            o = (before[:, None] * o + share[:, None] * tl.dot(p.to(v.dtype), v)) / l_new[:, None]
            tl.store(o_ptr + head + i * stride_t + tile, o.to(o_ptr.dtype.element_ty))
            tl.store(m_head + i + rows, m_new)
            tl.store(l_head + i + rows, l_new)
            # another warp reads next what this one has written
            tl.debug_barrier()


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """o and lse of (B, T, H, D) tensors of one layout."""
    B, T, H, D = q.shape
    o = torch.zeros_like(q)
    m = torch.full((B, H, T), float("-inf"), dtype=torch.float32, device=q.device)
    l = torch.zeros_like(m)
    block = 64
    first[(B * H,)](
        q, k, v, o, m, l, *q.stride()[:3], H, T, D**-0.5 * 1.4426950408889634,
        D=D, BLOCK=block, CAUSAL=causal, num_warps=4,
    )  # fmt: skip
    return o, (m + l.log2()) * 0.6931471805599453
