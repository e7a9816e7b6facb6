"""Masks on the device: the interval of keys that a position sees, and of positions that see a key.

The same arithmetic as `rooftile.masks`, with a mask's numbers as runtime integers so that a new window compiles nothing.
All positions are on the key axis and may be negative (T > S). Division truncates here, hence the care below zero.
"""

import triton
import triton.language as tl

# beyond any position; positions and bounds stay below it, so their sums fit in int32
FAR = tl.constexpr(1 << 29)


@triton.jit
def first_key(i, left, chunk, LEFT: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that position i sees."""
    low = i * 0
    if LEFT:
        low = tl.maximum(low, i - left)
    if CHUNK:
        low = tl.maximum(low, tl.where(i < 0, 0, i // chunk * chunk))
    return low


@triton.jit
def last_key(i, S, right, prefix, chunk, RIGHT: tl.constexpr, PREFIX: tl.constexpr, CHUNK: tl.constexpr):
    """The last key that position i sees; below `first_key` if there is none."""
    high = i * 0 + (S - 1)
    if RIGHT:
        high = tl.minimum(high, i + right)
    if PREFIX:
        high = tl.minimum(high, tl.maximum(i, prefix - 1))
    if CHUNK:
        # a position before the first key is in no key's chunk
        high = tl.minimum(high, tl.where(i < 0, -1, i // chunk * chunk + (chunk - 1)))
    return high


@triton.jit
def visible(
    i, j, S, left, right, prefix, chunk,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Whether position i sees key j, elementwise over broadcastable tensors; no key past the end is seen.

    Term by term rather than by the interval's ends: comparisons of a base and a constant cost no registers.
    """
    sees = j < S
    if LEFT:
        sees = sees & (j >= i - left)
    if RIGHT:
        sees = sees & (j <= i + right)
    if PREFIX:
        sees = sees & ((j <= i) | (j < prefix))
    if CHUNK:
        start = i // chunk * chunk
        sees = sees & (i >= 0) & (j >= start) & (j < start + chunk)
    return sees


@triton.jit
def first_position(j, right, prefix, chunk, RIGHT: tl.constexpr, PREFIX: tl.constexpr, CHUNK: tl.constexpr):
    """The first position whose `last_key` reaches key j."""
    low = j * 0 - FAR
    if RIGHT:
        low = tl.maximum(low, j - right)
    if PREFIX:
        low = tl.maximum(low, tl.where(j < prefix, -FAR, j))
    if CHUNK:
        low = tl.maximum(low, j // chunk * chunk)
    return low


@triton.jit
def last_position(j, left, chunk, LEFT: tl.constexpr, CHUNK: tl.constexpr):
    """The last position whose `first_key` does not pass key j."""
    high = j * 0 + FAR
    if LEFT:
        high = tl.minimum(high, j + left)
    if CHUNK:
        high = tl.minimum(high, j // chunk * chunk + (chunk - 1))
    return high
