"""Activations in fp32, for kernels in Triton and in Gluon, which calls Triton's functions: so both have the same bits."""

import triton
import triton.language as tl


@triton.jit
def activated(x, KIND: tl.constexpr):
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "tanh":
        # gelu(x) = x (1 + tanh z) / 2 with z = √(2/π) (x + 0.044715 x³), and (1 + tanh z) / 2 = 1 / (1 + exp(-2z)): nothing
        # cancels, and exp may overflow, as x / inf is the zero that is due
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * (x * x * x))))
    elif KIND == "erf":
        y = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "relu")
        # in this order NaN stays NaN
        y = tl.where(x <= 0.0, 0.0, x)
    return y
