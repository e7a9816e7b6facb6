"""Random bits that depend only on position and seed: Philox4x32-10 in integer arithmetic, the same bits as in the kernels.

For dropout the counter is (column, row, head, batch) and the key is the seed. So whether a weight is dropped depends only on
its position: the backward, and every backend, tile size and batch composition, draws the same.

Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.exact.places import places_of

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
    """Marks the weights to keep: booleans in the broadcast shape of the four indices. seed: int64, its first element counts."""
    seed = seed.reshape(-1)[0].to(column.device)
    return words(seed, column, row, head, batch)[0] >= threshold(dropout)


def counters(seed: Tensor, batch: int, sizes: tuple[int, int, int, int], device: torch.device) -> tuple[Tensor, ...]:
    """Returns the batch, head, row and column of each weight (B, H, T, S); the first sequence is number `batch` of the call."""
    b, h, t, j = (torch.arange(n, device=device) for n in sizes)
    b = b[:, None, None, None] + batch
    places = places_of(seed)
    if places is None:
        return b, h[:, None, None], t[:, None], j
    batch_0, head_0, row_0, column_0 = (places.to(device)[b, n] for n in range(4))
    return batch_0, head_0 + h[:, None, None], row_0 + t[:, None], column_0 + j


def distances(seed: Tensor | None, batch: int, B: int, T: int, S: int, device: torch.device) -> Tensor:
    """Returns the distances of queries and keys, (T, S) or, with places, (B, 1, T, S)."""
    places = None if seed is None else places_of(seed)
    between = torch.arange(T, device=device)[:, None] - torch.arange(S, device=device)
    if places is None:
        return (between + (S - T)).abs()
    own = places.to(device)[batch : batch + B]
    return (between + (own[:, 2] - own[:, 3])[:, None, None, None]).abs()
