"""An fp32 number as a bf16 number and a rest of 16 bits, which together are its bits exactly.

The bf16 number is the nearest (of two that are equally near, the one farther from zero), so a model computes with weights that
are rounded without bias. The rest is the signed difference of the bits: bits of fp32 = bits of bf16 * 2^16 + rest. A NaN has the
rest 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def join(high: Tensor, rest: Tensor) -> Tensor:
    """Returns the fp32 numbers of bf16 numbers and their rests in int16.

    Example:
        >>> x = torch.randn(5)
        >>> torch.equal(join(*split(x)), x)
        True
    """
    return ((high.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns bf16 numbers and rests in int16 of fp32 numbers."""
    lost = x != x
    bits = x.contiguous().view(torch.int32)
    # arithmetic wraps, so that the rest is exact also where rounding passes the largest number
    high = (bits + 0x8000) >> 16
    rest = bits - (high << 16)
    high = torch.where(lost, 0x7FC0, high)
    return high.to(torch.int16).view(torch.bfloat16), torch.where(lost, 0, rest).to(torch.int16)
