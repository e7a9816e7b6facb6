"""Codes of 4 bits, two per byte, the first of them in the low half."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

# signed codes are stored with this added
OFFSET = 8


def pack(codes: Tensor) -> Tensor:
    """Packs unsigned codes 0 to 15 (..., K) into bytes (..., K / 2); an odd K is filled up with a zero.

    Example:
        >>> pack(torch.tensor([1, 2, 15], dtype=torch.uint8))
        tensor([33, 15], dtype=torch.uint8)
    """
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, codes.shape[-1] % 2))
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor, K: int) -> Tensor:
    """Unpacks bytes (..., K / 2) to unsigned codes (..., K)."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :K]


def words_to_bytes(words: Tensor) -> Tensor:
    """Turns int32 words of eight codes, the first in the lowest bits, into bytes of two codes, on a host of any byte order."""
    if sys.byteorder == "little":
        return words.contiguous().view(torch.uint8)
    shifts = torch.arange(0, 32, 8, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 255).to(torch.uint8).flatten(-2)


def unpack_words(words: Tensor) -> Tensor:
    """Unpacks int32 words (..., n) of eight codes to unsigned codes (..., 8 n)."""
    return unpack(words_to_bytes(words), 8 * words.shape[-1])


def pack_words(codes: Tensor) -> Tensor:
    """Packs unsigned codes (..., K) into int32 words (..., K / 8), the first code in the lowest bits; the end is zeros."""
    codes = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8))
    words = (codes << torch.arange(0, 32, 4, device=codes.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
