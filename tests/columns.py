"""The order "columns" of quantised values, by its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.numerics.recipe import sequence_of_rows
from rooftile.numerics.scaling import BLOCK

# which key of each 16 comes at each place of values in columns: as a thread of a matrix instruction holds weights
COLUMN_ORDER = tuple(8 * eight + 2 * lane + one for lane in range(4) for eight in range(2) for one in range(2))


def columns_of(v: Tensor, cu: Tensor | None) -> Tensor:
    """Codes of values, in rows, put into columns; places that no key fills are zero."""
    if cu is None:
        columns = torch.nn.functional.pad(v.permute(0, 2, 3, 1).contiguous().view(torch.int8), (0, -v.shape[1] % BLOCK))
    else:
        sequence = sequence_of_rows(cu, v.shape[0])
        start = cu.long()[sequence]
        place = (start // BLOCK + sequence) * BLOCK + torch.arange(v.shape[0], device=v.device) - start
        parts = v.shape[0] // BLOCK + cu.shape[0] - 1
        columns = torch.zeros(1, *v.shape[1:], parts * BLOCK, dtype=torch.int8, device=v.device)
        columns[0].index_copy_(-1, place, v.permute(1, 2, 0).contiguous().view(torch.int8))
    ordered = columns.unflatten(-1, (-1, 16))[..., list(COLUMN_ORDER)].flatten(-2)
    return ordered.contiguous().view(v.dtype)
