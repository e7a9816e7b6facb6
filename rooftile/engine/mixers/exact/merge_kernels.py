"""Merging what several ranks have found, in one launch: a program has the parts of one row, and reads each once.

lse = log (exp(sink) + sum_r exp(lse_r))          o = sum_r exp(lse_r - lse) o_r
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.runtime.launch import Kernel


# fmt: off
@triton.jit(do_not_specialize=["lines", "ranks", "H"])
def _merge(
    parts_ptr, sinks_ptr, o_ptr, lines, ranks, H,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr,
):
    # fmt: on
    """Merges parts (ranks, lines, D + 1), each with its lse behind it, to o (lines, D); lines are tokens and heads."""
    line = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    m = tl.full((), float("-inf"), tl.float32)
    l = tl.zeros((), tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    if SINKS:
        # one more score, whose value is 0
        m = tl.load(sinks_ptr + line % H).to(tl.float32)
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    for rank in range(ranks):
        part = parts_ptr + (rank * lines.to(tl.int64) + line) * (D + 1)
        lse = tl.load(part + D)
        # a rank without a key has no weight, whatever its o
        o = tl.where(lse == float("-inf"), 0.0, tl.load(part + d, mask=d < D, other=0.0))
        m_new = tl.maximum(m, lse)
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, p = tl.exp(m - pivot), tl.exp(lse - pivot)
        acc = acc * alpha + o * p
        l = l * alpha + p
        m = m_new
    l = tl.where(l == 0.0, 1.0, l)
    tl.store(o_ptr + line * D + d, (acc / l).to(o_ptr.dtype.element_ty), mask=d < D)


_start = Kernel(_merge)


def merge(parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns o (n, H, D) in `dtype`, of contiguous parts (ranks, n, H, D + 1) in fp32; the host waits for nothing."""
    ranks, n, H, width = parts.shape
    o = torch.empty(n, H, width - 1, dtype=dtype, device=parts.device)
    arguments = parts, o if sinks is None else sinks.contiguous(), o, n * H, ranks, H
    _start((n * H, 1, 1), arguments, constants_of(width - 1, sinks is not None))
    return o


@cache
def constants_of(dim: int, has_sinks: bool) -> dict[str, Any]:
    """Returns the compile-time arguments."""
    return {"D": dim, "BLOCK_D": triton.next_power_of_2(dim), "SINKS": has_sinks, "num_warps": 1 if dim <= 128 else 2}
