"""Torch's own fused attention kernels, whatever is registered over them.

`rooftile.integrations` may put Rooftile in the place of these operators. Calling the operators from here would then come
back here for ever, so each kernel is looked up once and called past the dispatcher. Whoever overrides an operator calls
`kernel` for it first: what is found afterwards is the override.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

CPU_FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
CPU_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
CUDA_FORWARD = "aten::_scaled_dot_product_flash_attention"
CUDA_BACKWARD = "aten::_scaled_dot_product_flash_attention_backward"


@cache
def kernel(operator: str, key: str) -> Callable[..., Any]:
    """The kernel behind an operator of torch for a dispatch key ("CPU", "CUDA"), as it was at the first call.

    It takes the operator's arguments, runs below autograd, and returns what the operator returns.

    >>> o, lse = kernel(CPU_FORWARD, "CPU")(q, k, v, 0.0, True)
    """
    found = torch.library.get_kernel(operator, key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def call(*args: Any, **kwargs: Any) -> Any:
        return found.call_boxed(keys, *args, **kwargs)

    return call
