"""Attention that computes less than all pairs, and says what it loses: one file per method.

    from rooftile import approximate as ap
    o = ap.linear(q, k, v, rooftile.CAUSAL)
"""

from rooftile.approximate.linear import linear, linear_step

__all__ = ["linear", "linear_step"]
