"""Assigns tiles of heads of sequences to programs.

Dense: heads are taken in waves whose keys and values fit in the L2 cache together, and inside a wave the tiles with the most
work go first (under a causal mask the last queries), so that the chip does not wait for one long tile at the end.

Packed: sequence b owns the slots from cu[b] // BLOCK + b on. That is never fewer than its tiles, and needs no prefix sum,
no longest length and no word from the host; a slot past a sequence's end has nothing to do.
"""

import triton
import triton.language as tl


@triton.jit
def dense_tile(pid, tiles, BH, wave, LAST_FIRST: tl.constexpr):
    """The (batch and head, tile) of program `pid`: `wave` heads run together."""
    i_wave = pid // (wave * tiles)
    here = tl.minimum(wave, BH - i_wave * wave)
    rank = pid - i_wave * wave * tiles
    i_bh = i_wave * wave + rank % here
    i_tile = rank // here
    if LAST_FIRST:
        i_tile = tiles - 1 - i_tile
    return i_bh, i_tile


@triton.jit
def packed_tile(slot, cu, B, BLOCK: tl.constexpr):
    """The (sequence, tile) of a slot; the tile may lie past the sequence's end."""
    low = 0
    high = B
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu + middle).to(tl.int32) // BLOCK + middle <= slot:
            low = middle
        else:
            high = middle
    return low, slot - (tl.load(cu + low).to(tl.int32) // BLOCK + low)
