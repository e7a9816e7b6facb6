"""What a Problem must cost: arithmetic (flops), bytes through memory and caches (io), and the least time (roofline).

Everything that prints a FLOP, a byte or a percentage of the roofline takes it from here.
"""

from rooftile.cost import flops, io
from rooftile.cost.roofline import Roof, roof

__all__ = ["Roof", "flops", "io", "roof"]
