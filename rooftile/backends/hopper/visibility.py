"""Masks on the device: the interval of keys that a position sees.

`rooftile.masks` in Gluon, for scalars and for vectors of positions alike. A mask's numbers are runtime integers, so a new
window compiles nothing. Positions are on the key axis and may be negative (T > S); division truncates, hence the care
below zero.
"""

from rooftile.backends.hopper.gluon import gl, gluon


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
