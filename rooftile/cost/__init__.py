"""The cost model of a Problem: FLOPs (flops), bytes through memory and caches (io), and the minimum time (roofline).

`counts` has the FLOPs and bytes of one call of each operator.

All code that prints FLOPs, bytes or a percentage of the roofline takes them from here.
"""

from rooftile.cost import counts, flops, io, traffic
from rooftile.cost.roofline import Roof, memory_roof, roof

__all__ = ["Roof", "counts", "flops", "io", "memory_roof", "roof", "traffic"]
