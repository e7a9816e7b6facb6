"""Many rows of x put in the order in which threads hold weights, before a product (`widened`, `two_four`)."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.runtime.dependent_launch import overlaps, wait_for_inputs
from rooftile.runtime.launch import Kernel

# columns of K that are reordered per step, and steps per program
STEP, STEPS = 128, 16


@triton.jit
def _in_order(x_ptr, o_ptr, x_stride, K, STEPS: tl.constexpr, ORDER: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        wait_for_inputs()
    m = tl.program_id(0).to(tl.int64)
    k = (tl.program_id(1) * STEPS + tl.arange(0, STEPS))[:, None] * 128 + tl.arange(0, 128)[None, :]
    padded = (K + 127) // 128 * 128
    x = tl.load(x_ptr + m * x_stride + k, mask=k < K, other=0.0)
    # the orders follow `widened.in_order` and `two_four.in_pairs`
    if ORDER == "pairs":
        x = x.reshape([STEPS, 4, 16, 2]).permute((0, 2, 1, 3)).reshape([STEPS, 128])
    elif ORDER == "bytes":
        x = x.reshape([STEPS, 4, 8, 2, 2]).permute((0, 2, 4, 1, 3)).reshape([STEPS, 128])
    else:
        x = x.reshape([STEPS, 4, 4, 2, 2, 2]).permute((0, 2, 4, 5, 1, 3)).reshape([STEPS, 128])
    tl.store(o_ptr + m * padded + k, x.to(o_ptr.dtype.element_ty), mask=k < padded)


_start = Kernel(_in_order)


def in_order(x: Tensor, order: str, dtype: torch.dtype | None = None) -> Tensor:
    """Returns x (M, K), with each 128 numbers of a row in order, and zeros up to a multiple of them.

    Args:
        order: for codes of 4 bits ("nibbles") and of 8 ("bytes"), and for 2:4 weights ("pairs").
        dtype: the dtype of the result; None for the dtype of x.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    M, K = x.shape
    steps = triton.cdiv(K, STEP)
    o = torch.empty((M, steps * STEP), dtype=dtype or x.dtype, device=x.device)
    _start((M, triton.cdiv(steps, STEPS), 1), (x, o, x.stride(0), K), _constants(order, x.device))
    return o


@cache
def _constants(order: str, device: torch.device) -> dict[str, object]:
    return {"STEPS": STEPS, "ORDER": order, "num_warps": 4} | overlaps(device)
