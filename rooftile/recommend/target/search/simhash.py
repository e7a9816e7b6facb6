"""SimHash: the sides of random planes on which a vector lies, as bits; vectors at a small angle differ in few.

Charikar, Similarity Estimation Techniques from Rounding Algorithms, STOC 2002; Chen et al., arXiv:2108.04468.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import check_count, shown, whole


def simhash_planes(dim: int, bits: int = 64, *, seed: int = 0, device: torch.device | str | None = None) -> Tensor:
    """Draws the normals of random planes, (dim, bits) fp32; the same on every device.

    Args:
        dim: of the vectors.
        bits: of a hash, at most 1024; 32 take a word.
        seed: of the generator, which is on the host.
        device: of the result.

    Raises:
        InvalidInput: an argument is wrong.

    Example:
        >>> simhash_planes(64, 128).shape
        torch.Size([64, 128])
    """
    dim, bits = check_count("dim", dim), check_count("bits", bits)
    if bits > 1024:
        raise InvalidInput(f"bits is {bits}; must be at most 1024")
    number = whole(seed)
    if number is None or not 0 <= number < 2**63:
        raise InvalidInput(f"seed is {shown(seed)}; must be an int from 0 to 2**63 - 1")
    return torch.randn(dim, bits, generator=torch.Generator().manual_seed(number)).to(device)


def simhash(x: Tensor, planes: Tensor) -> Tensor:
    """Hashes vectors: bit b says whether a vector lies on the positive side of plane b.

    Args:
        x: vectors (..., D) of any floats.
        planes: (D, m), as `simhash_planes` draws them.

    Returns:
        Words (..., ceil(m / 32)) int32; the bits past m are 0. Products are in fp64, so that devices agree on all but vectors
        that lie in a plane.

    Raises:
        InvalidInput: an argument is wrong.

    Example:
        >>> simhash(torch.randn(10, 4, 64), simhash_planes(64, 96)).shape
        torch.Size([10, 4, 3])
    """
    check_planes(planes, x)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        bits = (x.double() @ planes.double()) > 0
        more = -bits.shape[-1] % 32
        words = torch.nn.functional.pad(bits.int(), (0, more)).unflatten(-1, (-1, 32))
        return (words.long() << torch.arange(32, device=x.device)).sum(-1).int()


def check_planes(planes: Any, x: Any) -> None:
    """Raises InvalidInput unless these are planes for such vectors."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.ndim:
        raise InvalidInput(f"x is {shown(x)}; must be a float tensor (..., D)")
    if not isinstance(planes, Tensor) or not planes.is_floating_point() or planes.ndim != 2 or planes.shape[0] != x.shape[-1]:
        raise InvalidInput(
            f"planes is {shown(planes)}; must be a float tensor ({x.shape[-1]}, bits): simhash_planes({x.shape[-1]}, bits)"
        )
    if not 1 <= planes.shape[1] <= 1024:
        raise InvalidInput(f"planes has {planes.shape[1]} columns; must have 1 to 1024, a bit each")
    if planes.device != x.device:
        raise InvalidInput(f"planes is on {planes.device}; the vectors are on {x.device}, and all inputs must be on one device")


def differing_bits(a: Tensor, b: Tensor) -> Tensor:
    """The number of bits in which words (..., W) of int32 differ, (...) int32."""
    x = a ^ b
    # the sign bit is counted apart, for a shift to the right repeats it
    sign, x = (x < 0).int(), x & 0x7FFFFFFF
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (sign + ((x * 0x01010101) >> 24)).sum(-1, dtype=torch.int32)
