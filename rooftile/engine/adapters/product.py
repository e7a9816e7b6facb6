"""Adds to a product what the adapters of its rows say: y += B (A x), row by row with the row's own A and B.

On a GPU two kernels do so (see `kernels`); the definition is here.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from rooftile.engine.adapters.groups import RowGroups
from rooftile.engine.adapters.matrices import Matrices
from rooftile.runtime.devices import runs_kernels


def add_adapters(y: Tensor, x: Tensor, matrices: Matrices, groups: RowGroups) -> None:
    """Adds to each row of y (n, out), in place, what its adapter makes of the row of x (n, in)."""
    if runs_kernels(y):
        from rooftile.engine.adapters.kernels import add_in_kernels

        add_in_kernels(y, x, matrices, groups)
        return
    order = groups.order.long()
    for slot, start, count, _ in groups.table.tolist():
        rows = order[start : start + count]
        given = x.index_select(0, rows)
        for part, (begin, end) in enumerate(pairwise(matrices.bounds)):
            if rank := int(matrices.ranks[slot, part]):
                first = part * matrices.rank
                shrunk = given @ matrices.a[slot, first : first + rank].T
                y[rows, begin:end] += shrunk @ matrices.b[slot, :rank, begin:end]
