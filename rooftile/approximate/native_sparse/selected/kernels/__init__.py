"""Triton kernels of attention to chosen blocks.

The forward and dq: a program owns a tile of queries with the heads of a group, and walks the union of their blocks:

    X = scale Q K_j^T          -inf where the query did not choose the block, or the key comes later
    P = exp(X - L)             O += P V_j;  dP = dO V_j^T;  dQ += P (dP - D) K_j

dk and dv: a program owns a block of keys of one head, and walks the queries that chose it, so every sum has one owner and one
order. A long list has parts, whose sums are kept in fp32 and added in their order.

A product with a weight of 0 is not harmless when the other factor is NaN. A tile whose result holds a NaN is computed again with
the non-finite factors set aside, and NaN in the rows that see them.
"""

from rooftile.approximate.native_sparse.selected.kernels.deltas import deltas
from rooftile.approximate.native_sparse.selected.kernels.gradients import dkdv, dq
from rooftile.approximate.native_sparse.selected.kernels.lists import KeyLists, key_lists, unions
from rooftile.approximate.native_sparse.selected.kernels.outputs import forward

__all__ = ["KeyLists", "deltas", "dkdv", "dq", "forward", "key_lists", "unions"]
