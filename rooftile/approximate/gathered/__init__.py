"""Attention between gathered rows: exact softmax within groups of rows that lie anywhere, by lists of their places.

lists      the lists, from hashes (Reformer) or members of clusters (Routing Transformer)
kernels    Triton: the forward, dq, dk with dv, and the sums over rounds and groups
plain      the same by plain operations
attention  the operator
grouping   hashes and members in their kernels
"""

from rooftile.approximate.gathered.attention import attend, refusal
from rooftile.approximate.gathered.grouping import best_members, can_choose, hashes
from rooftile.approximate.gathered.lists import RowLists, from_hashes, from_members, sorted_rows

__all__ = ["RowLists", "attend", "best_members", "can_choose", "from_hashes", "from_members", "hashes", "refusal", "sorted_rows"]
