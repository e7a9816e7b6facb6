"""An fp32 number as a bf16 number and a rest of 16 bits, which together are its bits exactly.

The bf16 number is the nearest (of two that are equally near, the one farther from zero), so a model computes with weights that
are rounded without bias. The rest is the signed difference of the bits: bits of fp32 = bits of bf16 * 2^16 + rest. A NaN has the
rest 0.

A rest is worth nothing beside another weight than its own: beside a zero that was set by hand, a negative one would make NaN. So
each block of weights has a sum over its bits, taken when the rests were written. A block with another sum was changed by somebody
else, and begins anew from its bf16 numbers. The sum sees what no version counter does: `weight.data.copy_`, and a load before the
optimiser's own states are loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# weights that share a sum, in the order in which they lie in memory
BLOCK = 2048
# odd numbers with bits everywhere: 2^32 over the golden ratio, and a multiplier of MurmurHash
PLACE, MIX = -1640531527, -2048144789


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


def sums_of(weight: Tensor) -> Tensor:
    """Returns a sum over the bits and places of each block of bf16 weights, int32 (blocks,).

    Example:
        >>> x = torch.zeros(2 * BLOCK, dtype=torch.bfloat16)
        >>> before = sums_of(x)
        >>> x[1] = 1.0
        >>> (sums_of(x) != before).tolist()
        [True, False]
    """
    bits = _in_memory(weight).view(torch.int16).int()
    places = torch.arange(bits.numel(), device=bits.device, dtype=torch.int32) % BLOCK
    mixed = (bits ^ (places * PLACE)) * MIX
    mixed = mixed ^ ((mixed >> 15) & 0x1FFFF)
    return functional.pad(mixed, (0, -mixed.numel() % BLOCK)).view(-1, BLOCK).sum(1).to(torch.int32)


def own_rests(weight: Tensor, rest: Tensor, sums: Tensor) -> Tensor:
    """Returns the rests, and 0 in blocks whose weights have changed since their sums were taken."""
    # the sums follow the memory of the rests, whose weight may lie in another order since
    if is_channels_last(weight) != is_channels_last(rest):
        weight = torch.empty_like(rest, dtype=weight.dtype).copy_(weight)
    unchanged = (sums_of(weight) == sums).repeat_interleave(BLOCK)[: weight.numel()]
    if is_channels_last(weight):
        B, C, H, W = weight.shape
        return torch.where(unchanged.view(B, H, W, C).permute(0, 3, 1, 2), rest, 0)
    return torch.where(unchanged.view(weight.shape), rest, 0)


def is_channels_last(weight: Tensor) -> bool:
    """Whether a weight of four axes lies in memory with its second axis last, and not as it is written."""
    return weight.ndim == 4 and not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)


def _in_memory(weight: Tensor) -> Tensor:
    return (weight.permute(0, 2, 3, 1) if is_channels_last(weight) else weight).reshape(-1)
