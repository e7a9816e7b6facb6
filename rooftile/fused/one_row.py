"""PyTorch's linear projection, with a kernel for one row without gradients, as a decode step of one sequence has it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.fused import kernels
from rooftile.runtime.devices import runs_kernels
from rooftile.runtime.early_weights import may_read_early
from rooftile.runtime.operators import is_recorded


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` of x (total, in), in 16 bits faster for one row; sums are in fp32 either way."""
    if x.shape[0] == 1 and not is_recorded(x, weight, bias) and _takes(x, weight, bias):
        return kernels.one_row.product(x, weight, bias, may_read_early())
    return functional.linear(x, weight, bias)


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel runs: in one dtype of 16 bits, on a weight in one piece that is not too wide."""
    alike = all(part is None or (part.dtype == x.dtype and part.is_contiguous()) for part in (weight, bias))
    if not alike or x.dtype not in (torch.bfloat16, torch.float16) or x.ndim != 2 or x.is_meta or not runs_kernels(x):
        return False
    return weight.numel() > 0 and kernels.one_row.steps(weight.shape[1]) <= kernels.one_row.STEPS
