"""Parts that the kernels of recurrences share: functions of numbers, tensors in a readable form, and why a kernel refuses."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) to the last bits of fp32, for small results too: the fast logarithm is not exact near 1."""
    e = tl.exp(-tl.abs(x))
    # log(1 + e) = 2 atanh(s), by its series; s is at most 1/3
    s = e / (2 + e)
    q = s * s
    series = 1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13 + q / 15))))))
    return tl.where(x > 0, x, 0.0) + 2 * s * series


@triton.jit
def silu(x):
    """x / (1 + exp(-x))."""
    return x / (1 + tl.exp(-x))


def readable(x: Tensor) -> Tensor:
    """Returns x with its last axis in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def token_strides(x: Tensor, packed: bool) -> tuple[int, int]:
    """Returns the strides of the batch and of the tokens; a packed batch is one."""
    return (0, x.stride(0)) if packed else (x.stride(0), x.stride(1))


def unknown_dtype(x: Tensor, state: Tensor) -> str | None:
    """Says that tensors are in a dtype without kernels, or returns None."""
    for given in (x, state):
        if given.dtype not in DTYPES:
            return f"{str(given.dtype).removeprefix('torch.')}; has float32, bfloat16, float16"
    return None


@cache
def processors(device: torch.device) -> int:
    """Returns the multiprocessors of a GPU, and a few in place of a CPU's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
