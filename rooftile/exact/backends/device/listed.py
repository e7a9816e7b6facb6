"""Lists of blocks on the device: the tiles of a walk along one, and the pairs that are seen in a part of a block."""

from typing import NamedTuple

import triton
import triton.language as tl


class ListPointers(NamedTuple):
    """All lists of a call, of queries or of keys, and their numbers: see the `list_numbers` and `key_list_numbers` of a call."""

    counts_ptr: tl.tensor
    entries_ptr: tl.tensor
    bits_ptr: tl.tensor
    numbers: tl.tuple


class List(NamedTuple):
    """The list that a walk follows.

    An entry of a list of queries is a block of keys. An entry of a list of keys is a block of queries, and the place of those keys in
    its list.
    """

    entries: tl.tensor  # a pointer to the first
    bits: tl.tensor  # a pointer to the bits of that list of queries, or of the sequence's and head's first
    part: tl.tensor  # how many blocks of a list of queries have bits


@triton.jit
def first_of_listed(n, entries, end, SIZE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """The first position of tile number n of a walk along a list of blocks of SIZE positions.

    Positions end at `end`. The tile of a block that there is not begins there, so that nothing of it is seen or read.
    """
    PER: tl.constexpr = SIZE // BLOCK
    place = n // PER
    block = tl.load(entries + place * STEP)
    is_there = (block >= 0) & (block < tl.cdiv(end, SIZE))
    return tl.where(is_there, tl.where(is_there, block, 0) * SIZE + (n - place * PER) * BLOCK, end)


@triton.jit
def seen_bits(bits, place, part, t, j, S, SPEC: tl.constexpr):
    """Whether query t of a sequence sees key j by the bits of a block, at its place in the list of the query's block.

    t and j broadcast to the tile. A block without bits is seen whole.
    """
    WORDS: tl.constexpr = SPEC.LIST_S // 32
    row = t % SPEC.LIST_T
    column = j % SPEC.LIST_S
    offset = (place * SPEC.LIST_T).to(tl.int64) * WORDS + row * WORDS + column // 32
    word = tl.load(bits + offset, mask=(place < part) & (j < S), other=-1)
    return ((word >> (column % 32)) & 1) != 0
