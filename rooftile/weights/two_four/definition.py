"""Masks and compression in plain PyTorch operations, which every kernel must agree with bit for bit.

G is K / 4, the groups of four neighbours in a row.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rooftile.weights.two_four.patterns import PAIRS, PATTERNS, table

# blocks of 4 x 4 whose 90 sums are in memory at once
BLOCKS = 1 << 15
# numbers of rows whose steps are in memory at once: they take ten times the bytes of the rows, and fit in a CPU's caches
NUMBERS = 1 << 18
# integers of the size of a number: moving a number must not change it, and FP8 has few operations
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(x: Tensor) -> Tensor:
    """Returns the bits of numbers as integers; shares memory."""
    return x.view(_BITS[x.element_size()])


def row_mask(w: Tensor) -> Tensor:
    """Returns which weights of w (N, K) are the two largest of their four; ties go to the lower index."""
    return torch.cat([_row_mask(rows) for rows in w.split(_rows_at_once(w))])


def _rows_at_once(w: Tensor) -> int:
    return max(NUMBERS // max(w.shape[1], 1), 1)


def _row_mask(w: Tensor) -> Tensor:
    sizes = w.float() if w.element_size() == 1 else w
    a, b, c, d = sizes.abs().unflatten(1, (-1, 4)).unbind(-1)  # (N, G)
    # whether the first of two is kept before the second
    ab, ac, ad, bc, bd, cd = a >= b, a >= c, a >= d, b >= c, b >= d, c >= d
    # a weight is kept unless two of the others are kept before it
    lost = (~ab, ~ac, ~ad), (ab, ~bc, ~bd), (ac, bc, ~cd), (ad, bd, cd)
    kept = [~((one & two) | (one & three) | (two & three)) for one, two, three in lost]
    return torch.stack(kept, -1).flatten(1)


def transposable_mask(w: Tensor) -> Tensor:
    """Returns the mask (N, K) whose blocks of 4 x 4 have the pattern with the largest sum of |w|; ties go to the lower number.

    Sums are in fp32, in fp64 for fp64, as (row 0 + row 1) + (row 2 + row 3): the order is a part of the definition.
    """
    N, K = w.shape
    sizes = w.abs() if w.dtype == torch.float64 else w.float().abs()
    blocks = sizes.view(N // 4, 4, K // 4, 4).transpose(1, 2).reshape(-1, 4, 4)
    found = torch.cat([_best(part) for part in blocks.split(BLOCKS)])
    return _kept(w.device)[found].view(N // 4, K // 4, 4, 4).transpose(1, 2).reshape(N, K)


def _best(blocks: Tensor) -> Tensor:
    """The numbers of the best patterns of blocks (n, 4, 4)."""
    first, second = (list(columns) for columns in zip(*PAIRS, strict=True))
    pairs = blocks[:, :, first] + blocks[:, :, second]  # (n, 4, 6)
    rows = torch.tensor(PATTERNS, device=blocks.device).T
    top = pairs[:, 0, rows[0]] + pairs[:, 1, rows[1]]
    # the first of several largest ones
    return (top + (pairs[:, 2, rows[2]] + pairs[:, 3, rows[3]])).argmax(1)


@cache
def _kept(device: torch.device) -> Tensor:
    return table().T.bool().contiguous().to(device)  # (90, 16)


def compressed(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what a mask keeps of w: values (N, K / 2), and places uint8 (N, K / 8 rounded up).

    The places of a group are four bits: the index of its first value, and 4 times its second's. The lower half of a byte is
    the first of two groups.
    """
    rows = _rows_at_once(w)
    parts = [_compressed(some, kept) for some, kept in zip(w.split(rows), mask.split(rows), strict=True)]
    values, places = (torch.cat(each) for each in zip(*parts, strict=True))
    return values, places


def _compressed(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    kept = mask.unflatten(1, (-1, 4))
    a, b, c, d = kept.unbind(-1)
    two, three = torch.full_like(a, 2, dtype=torch.uint8), torch.full_like(a, 3, dtype=torch.uint8)
    # the first is 0, 1 or 2, and the second 1, 2 or 3
    first = torch.where(a, two - 2, torch.where(b, two - 1, two))
    second = torch.where(d, three, torch.where(c, two, two - 1))
    places = torch.stack((first, second), -1)
    values = bits_of(w.contiguous()).unflatten(1, (-1, 4)).gather(-1, places.long()).flatten(1).view(w.dtype)
    four = torch.nn.functional.pad(first | second << 2, (0, first.shape[1] % 2))
    return values, four[:, 0::2] | four[:, 1::2] << 4


def dense(values: Tensor, places: Tensor, K: int) -> Tensor:
    """Returns the weight (N, K) with zeros between its values, in their dtype."""
    four = torch.stack((places & 15, places >> 4), -1).flatten(1)[:, : K // 4]  # (N, G)
    index = torch.stack((four & 3, four >> 2), -1).long()
    bits = bits_of(values.contiguous()).unflatten(1, (-1, 2))
    found = bits.new_zeros(*four.shape, 4).scatter_(-1, index, bits)
    return found.flatten(1).view(values.dtype)
