"""Many rows of x put in the order in which threads hold codes, before a product (`widened`)."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.launch import Kernel

# numbers of K that are put in order together, and how many times that many a program has
STEP, STEPS = 128, 16


@triton.jit
def _in_order(x_ptr, o_ptr, x_stride, K, STEPS: tl.constexpr, WIDE: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    k = (tl.program_id(1) * STEPS + tl.arange(0, STEPS))[:, None] * 128 + tl.arange(0, 128)[None, :]
    padded = (K + 127) // 128 * 128
    x = tl.load(x_ptr + m * x_stride + k, mask=k < K, other=0.0)
    # the order is that of `widened.in_order`
    if WIDE:
        x = x.reshape([STEPS, 4, 8, 2, 2]).permute((0, 2, 4, 1, 3)).reshape([STEPS, 128])
    else:
        x = x.reshape([STEPS, 4, 4, 2, 2, 2]).permute((0, 2, 4, 5, 1, 3)).reshape([STEPS, 128])
    tl.store(o_ptr + m * padded + k, x, mask=k < padded)


_start = Kernel(_in_order)


def in_order(x: Tensor, wide: bool) -> Tensor:
    """Returns x (M, K), with each 128 numbers of a row in order, and zeros up to a multiple of them; `wide`: codes of 8 bits."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    M, K = x.shape
    steps = triton.cdiv(K, STEP)
    o = torch.empty((M, steps * STEP), dtype=x.dtype, device=x.device)
    _start((M, triton.cdiv(steps, STEPS), 1), (x, o, x.stride(0), K), _constants(wide))
    return o


@cache
def _constants(wide: bool) -> dict[str, int]:
    return {"STEPS": STEPS, "WIDE": wide, "num_warps": 4}
