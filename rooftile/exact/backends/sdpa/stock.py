"""PyTorch's own fused attention kernels, even if other kernels override them.

`rooftile.integrations` may replace these operators by Rooftile. Calling the operators from here would then recurse for
ever, so each kernel is looked up once and called past the dispatcher. Code that overrides an operator must call `kernel`
for it first: a later lookup finds the override.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rooftile.runtime.operators import below_autograd

CPU_FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
CPU_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
CUDA_FORWARD = "aten::_scaled_dot_product_flash_attention"
CUDA_BACKWARD = "aten::_scaled_dot_product_flash_attention_backward"


@cache
def kernel(operator: str, key: str) -> Callable[..., Any]:
    """Returns the kernel of a torch operator for a dispatch key ("CPU", "CUDA"), as it was at the first call.

    It has the arguments and results of the operator, and runs below autograd.

    >>> o, lse = kernel(CPU_FORWARD, "CPU")(q, k, v, 0.0, True)
    """
    if not hasattr(torch.library, "get_kernel"):
        # this PyTorch is too old for `rooftile.enable`: nothing overrides its operators
        return _operator(operator)
    found = torch.library.get_kernel(operator, key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def call(*args: Any, **kwargs: Any) -> Any:
        return found.call_boxed(keys, *args, **kwargs)

    return call


def _operator(name: str) -> Callable[..., Any]:
    overload = getattr(torch.ops.aten, name.partition("::")[2]).default

    def call(*args: Any, **kwargs: Any) -> Any:
        with below_autograd():
            return overload(*args, **kwargs)

    return call


def by_heads(x: Tensor) -> Tensor:
    """(B, T, H, D) in the layout of torch's kernels, (B, H, T, D). They misread a last axis that is not contiguous."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()
