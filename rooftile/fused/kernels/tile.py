"""How many numbers a program works on, and with how many warps.

A row is read once, whole, before anything is done with it, so what matters is how many bytes are in flight at once. Reasoned, not
yet measured, for an H200 with its 132 multiprocessors:

    1 row      One program, and all its time is latency. More warps save nothing where a thread has two loads of 16 bytes.
    256 rows   Some two programs on each multiprocessor, with everything in flight at once.
    8192 rows  A row of 4096 in bf16 is 8 kB of x and 8 of the residual. A multiprocessor holds at least four programs of 8 warps,
               64 kB in flight, and 25 to 40 should keep the memory busy. Every row reads the weight, and finds it in a cache.
"""

from __future__ import annotations

# Numbers per thread: two loads of 16 bytes in bf16. Twice that at 16384, since threads of 32 warps have 64 registers at most.
NUMBERS, MOST_WARPS = 16, 16
# Numbers per program: short rows, and heads, share one. The same for a piece of a gate: a row of 14336 has seven, and 8192
# rows have enough numbers that each should not be shorter.
PIECE = 2048
# ... and of a row that leaves the registers
LONG_PIECE = 8192


def warps_for(numbers: int) -> int:
    """Warps of a program that works on this many numbers."""
    return min(max(numbers // (32 * NUMBERS), 1), MOST_WARPS)
