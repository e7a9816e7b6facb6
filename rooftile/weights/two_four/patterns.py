"""The 90 patterns of a block of 4 x 4 that keep two weights in each row and in each column.

A row keeps one of six pairs of its columns, in the order of `PAIRS`. Patterns are numbered in lexicographic order of the pairs of
their four rows; the order is fixed, because a tie goes to the lower number.
"""

from __future__ import annotations

from itertools import combinations, product

import torch
from torch import Tensor

# the columns that a row keeps
PAIRS = tuple(combinations(range(4), 2))


def _all() -> tuple[tuple[int, ...], ...]:
    found = []
    for rows in product(range(len(PAIRS)), repeat=4):
        columns = [column for pair in rows for column in PAIRS[pair]]
        if all(columns.count(column) == 2 for column in range(4)):
            found.append(rows)
    return tuple(found)


# the pair of each row, pattern by pattern
PATTERNS = _all()
# a bit for each place of a block, row by row: bit 4 r + c is set where the weight in row r and column c is kept
BITS = tuple(
    sum(1 << 4 * row + column for row, pair in enumerate(rows) for column in PAIRS[pair]) for rows in PATTERNS
)  # fmt: skip


def table() -> Tensor:
    """Returns the patterns as columns: (16, 90) of 0 and 1, so that |w| of a block, flat, times it are the sums of what is kept.

    Example:
        >>> table().shape, table().sum(0).unique()
        (torch.Size([16, 90]), tensor([8.]))
    """
    return torch.tensor([[bits >> place & 1 for bits in BITS] for place in range(16)], dtype=torch.float32)
