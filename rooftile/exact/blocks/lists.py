"""Lists of blocks and their bits as tensors: made from booleans, turned, packed. Nothing here is read by the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# a block is whole tiles of every kernel
LEAST = 64
# bits of a word
BITS = 32


class TransposedLists(NamedTuple):
    """The lists seen from the keys: for each block of keys the blocks of queries that list it."""

    counts: Tensor  # (1|B, 1|heads, blocks of keys)
    # (1|B, 1|heads, blocks of keys, most, 2): a block of queries, and the place of this block of keys in its list
    entries: Tensor


def transposed(slots: Tensor) -> TransposedLists:
    """Returns the lists of keys, from the place of each block of keys in each list of queries, -1 where it is not listed."""
    slots = slots.mT
    counts, indices = lists_of(slots >= 0)
    return TransposedLists(counts, torch.stack([indices, slots.gather(-1, indices.long())], dim=-1))


def unpacked(words: Tensor) -> Tensor:
    """Returns the booleans (..., 32 n) of words (..., n)."""
    places = torch.arange(BITS, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> places) & 1).flatten(-2).bool()


def packed(seen: Tensor) -> Tensor:
    """Returns the words (..., n) of booleans (..., 32 n).

    Example:
        >>> packed(torch.tensor([True] + [False] * 30 + [True])).tolist()
        [-2147483647]
    """
    places = torch.arange(BITS, device=seen.device, dtype=torch.int64)
    words = (seen.unflatten(-1, (-1, BITS)).long() << places).sum(-1)
    # bit 31 is the sign
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def lists_of(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Returns counts and indices of booleans (..., blocks of queries, blocks of keys). A list rises."""
    keep = keep.contiguous()
    n = keep.shape[-1]
    counts = keep.sum(-1, dtype=torch.int32)
    # each block goes to the place after those before it; the others to one that is cut off
    targets = torch.where(keep, keep.cumsum(-1) - 1, n)
    blocks = torch.arange(n, device=keep.device, dtype=torch.int32).expand(keep.shape)
    indices = torch.zeros((*keep.shape[:-1], n + 1), device=keep.device, dtype=torch.int32)
    return counts, indices.scatter(-1, targets, blocks)[..., :n].contiguous()


def steps_of_lists(counts: Tensor, Hk: int, group: int) -> tuple[int, int, int]:
    """How a kernel finds a list: the steps from batch to batch and from head to head, in lists, and query heads of a list.

    A shared axis has a step of 0. counts are contiguous.

    Example:
        >>> steps_of_lists(torch.zeros(1, 2, 7, dtype=torch.int32), Hk=2, group=4)
        (0, 7, 4)
    """
    B, heads, n = counts.shape
    return (heads * n if B > 1 else 0), (n if heads > 1 else 0), (group if heads == Hk else 1)
