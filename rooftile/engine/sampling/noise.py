"""The noise of a draw, in Triton: what `sampler.gumbel` defines."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

FAST = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _log(x):
    """Returns the logarithm by the chip's single instruction, to within 2^-22, relative or absolute; the interpreter uses tl.log."""
    if FAST:
        y = libdevice.fast_logf(x)
    else:
        y = tl.log(x)
    return y


@triton.jit
def gumbel(seed, position, first, SIZE: tl.constexpr):
    """Returns the noise of SIZE tokens from token `first` on, a multiple of 4, to within 2^-16."""
    quad = (first // 4 + tl.arange(0, SIZE // 4)).to(tl.uint32)
    zero = quad * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(seed, quad, low, high, zero)
    # lays the four words of each quad side by side
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (SIZE,))
    w = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    small = w * (1 + w * (0.5 + w * (0.3333333333333333 + w * 0.25)))
    return -_log(tl.where(w < 0.015625, small, -_log(1 - w)))
