"""Masks on the device: the interval of keys that a position sees, and of positions that see a key.

The same arithmetic as `rooftile.exact.masks`, with a mask's numbers as runtime integers so that a new window compiles nothing.
All positions are on the key axis and may be negative (T > S). Integer division truncates towards zero here, so positions below
zero need care.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class MaskNumbers(NamedTuple):
    """A mask's numbers, as a kernel hands them to the functions that it calls.

    Which of them the mask has is known when a kernel is compiled: SPEC has the flags LEFT, RIGHT, PREFIX and CHUNK. They are no
    fields here because Triton 3.6 turns the constants of a tuple into runtime values when the tuple is assigned to a name.
    """

    left: tl.tensor
    right: tl.tensor
    prefix: tl.tensor
    chunk: tl.tensor


# beyond any position; positions and bounds stay below it, so their sums fit in int32
FAR = tl.constexpr(1 << 29)


@triton.jit
def first_key(i, mask, SPEC: tl.constexpr):
    """The first key that position i sees."""
    low = i * 0
    if SPEC.LEFT:
        low = tl.maximum(low, i - mask.left)
    if SPEC.CHUNK:
        low = tl.maximum(low, tl.where(i < 0, 0, i // mask.chunk * mask.chunk))
    return low


@triton.jit
def last_key(i, S, mask, SPEC: tl.constexpr):
    """The last key that position i sees; below `first_key` if there is none."""
    high = i * 0 + (S - 1)
    if SPEC.RIGHT:
        high = tl.minimum(high, i + mask.right)
    if SPEC.PREFIX:
        high = tl.minimum(high, tl.maximum(i, mask.prefix - 1))
    if SPEC.CHUNK:
        # a position before the first key is in no key's chunk
        high = tl.minimum(high, tl.where(i < 0, -1, i // mask.chunk * mask.chunk + (mask.chunk - 1)))
    return high


@triton.jit
def visible(i, j, S, mask, SPEC: tl.constexpr):
    """Whether position i sees key j, elementwise over broadcastable tensors; no key past the end is seen.

    Term by term rather than by the interval's ends: comparisons of a base and a constant cost no registers.
    """
    sees = j < S
    if SPEC.LEFT:
        sees = sees & (j >= i - mask.left)
    if SPEC.RIGHT:
        sees = sees & (j <= i + mask.right)
    if SPEC.PREFIX:
        sees = sees & ((j <= i) | (j < mask.prefix))
    if SPEC.CHUNK:
        start = i // mask.chunk * mask.chunk
        sees = sees & (i >= 0) & (j >= start) & (j < start + mask.chunk)
    return sees


@triton.jit
def first_position(j, mask, SPEC: tl.constexpr):
    """The first position whose `last_key` reaches key j."""
    low = j * 0 - FAR
    if SPEC.RIGHT:
        low = tl.maximum(low, j - mask.right)
    if SPEC.PREFIX:
        low = tl.maximum(low, tl.where(j < mask.prefix, -FAR, j))
    if SPEC.CHUNK:
        low = tl.maximum(low, j // mask.chunk * mask.chunk)
    return low


@triton.jit
def last_position(j, mask, SPEC: tl.constexpr):
    """The last position whose `first_key` does not pass key j."""
    high = j * 0 + FAR
    if SPEC.LEFT:
        high = tl.minimum(high, j + mask.left)
    if SPEC.CHUNK:
        high = tl.minimum(high, j // mask.chunk * mask.chunk + (mask.chunk - 1))
    return high
