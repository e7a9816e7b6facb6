"""Masks on the device: the interval of keys that a position sees, and of positions that see a key.

`rooftile.exact.masks` in Gluon, for scalars and for vectors of positions alike. A mask's numbers are runtime integers, so a new
window compiles nothing. Positions are on the key axis and may be negative (T > S); division truncates, hence the care
below zero.
"""

from rooftile.runtime.hopper.gluon import gl, gluon

# beyond any position; positions and bounds stay below it, so their sums fit in int32
FAR = gl.constexpr(1 << 29)


@gluon.jit
def first_key(i, left, chunk, LEFT: gl.constexpr, CHUNK: gl.constexpr):
    """The first key that position i sees."""
    low = i * 0
    if LEFT:
        low = gl.maximum(low, i - left)
    if CHUNK:
        low = gl.maximum(low, gl.where(i < 0, 0, i // chunk * chunk))
    return low


@gluon.jit
def last_key(i, S, right, prefix, chunk, RIGHT: gl.constexpr, PREFIX: gl.constexpr, CHUNK: gl.constexpr):
    """The last key that position i sees; below `first_key` if there is none."""
    high = i * 0 + (S - 1)
    if RIGHT:
        high = gl.minimum(high, i + right)
    if PREFIX:
        high = gl.minimum(high, gl.maximum(i, prefix - 1))
    if CHUNK:
        # a position before the first key is in no key's chunk
        high = gl.minimum(high, gl.where(i < 0, -1, i // chunk * chunk + (chunk - 1)))
    return high


@gluon.jit
def first_position(j, right, prefix, chunk, RIGHT: gl.constexpr, PREFIX: gl.constexpr, CHUNK: gl.constexpr):
    """The first position whose `last_key` reaches key j."""
    low = j * 0 - FAR
    if RIGHT:
        low = gl.maximum(low, j - right)
    if PREFIX:
        low = gl.maximum(low, gl.where(j < prefix, -FAR, j))
    if CHUNK:
        low = gl.maximum(low, j // chunk * chunk)
    return low


@gluon.jit
def last_position(j, left, chunk, LEFT: gl.constexpr, CHUNK: gl.constexpr):
    """The last position whose `first_key` does not pass key j."""
    high = j * 0 + FAR
    if LEFT:
        high = gl.minimum(high, j + left)
    if CHUNK:
        high = gl.minimum(high, j // chunk * chunk + (chunk - 1))
    return high
