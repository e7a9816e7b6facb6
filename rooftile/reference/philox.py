"""Random bits that depend on place and seed alone: Philox4x32-10 as integer arithmetic in torch, the bits that kernels draw too.

For dropout the counter is (column, row, head, batch) and the key is the seed, so a weight's fate depends on nothing but its
place: the backward draws it again, and so does any other backend, tile size or batch composition.

Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
_LOW = 0xFFFFFFFF


def threshold(dropout: float) -> int:
    """A weight is dropped when its 32 random bits, as an unsigned integer, are below this."""
    return min(round(dropout * 2**32), _LOW)


def words(seed: Tensor, *counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four random words of 32 bits, as int64, of each counter of four words; everything broadcasts. seed: int64."""
    c0, c1, c2, c3 = (c.to(torch.int64) for c in torch.broadcast_tensors(*counter))
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(ROUNDS):
        # 64-bit products wrap in int64, yet both halves of the bits are right
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> 32) & _LOW) ^ c1 ^ k0, b & _LOW, ((a >> 32) & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, dropout: float, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Which weights stay, as booleans of the four indices' broadcast shape. seed: int64, one element."""
    seed = seed.reshape(()).to(column.device)
    return words(seed, column, row, head, batch)[0] >= threshold(dropout)
