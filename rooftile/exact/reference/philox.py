"""Random bits that depend only on position and seed: Philox4x32-10 in integer arithmetic, the same bits as in the kernels.

For dropout the counter is (column, row, head, batch) and the key is the seed. So whether a weight is dropped depends only on
its position: the backward, and every backend, tile size and batch composition, draws the same.

Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
_LOW = 0xFFFFFFFF


def threshold(dropout: float) -> int:
    """Returns the threshold: a weight is dropped if its 32 random bits, as an unsigned integer, are below it."""
    return min(round(dropout * 2**32), _LOW)


def words(seed: Tensor, *counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four random 32-bit words, as int64, for each counter of four words; all arguments broadcast. seed: int64."""
    c0, c1, c2, c3 = (c.to(torch.int64) for c in torch.broadcast_tensors(*counter))
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(ROUNDS):
        # 64-bit products wrap in int64, yet both halves of the bits are right
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> 32) & _LOW) ^ c1 ^ k0, b & _LOW, ((a >> 32) & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, dropout: float, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Marks the weights to keep: booleans in the broadcast shape of the four indices. seed: int64, one element."""
    seed = seed.reshape(()).to(column.device)
    return words(seed, column, row, head, batch)[0] >= threshold(dropout)
