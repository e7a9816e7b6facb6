"""Attention to blocks of keys that each query chose: exact softmax over their tokens, causal.

tiles         queries in tiles that walk the union of their choices
kernels       Triton: the choice, the forward, dq, and dk with dv
plain         the same by plain operations
by_block      the same on a CPU, which reads the choices
gated_sum     the sum of three branches by their gates
attention     the operator
block_choice  the choice of blocks in its kernel
"""

from rooftile.approximate.native_sparse.selected.attention import attend

__all__ = ["attend"]
