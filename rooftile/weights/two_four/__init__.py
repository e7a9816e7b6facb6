"""2:4 sparsity: of each four neighbours along K a weight keeps two.

    mask = rt.sparsity.two_four(w)               # (N, K), True where a weight is kept
    weight = rt.sparsity.compress(w, mask)       # half of the values, and their places
    y = rt.linear(x, weight)

patterns             the 90 transposable patterns of a block of 4 x 4
definition           masks and compression in plain operations
mask_choice          `two_four`
compressed           `TwoFour` and `compress`
recipe               `Recipe`: how a model is trained for it, by `rooftile.qat.prepare`
compression_kernels  Triton
"""

from rooftile.weights.two_four.compressed import TwoFour, compress
from rooftile.weights.two_four.mask_choice import two_four
from rooftile.weights.two_four.recipe import Recipe

__all__ = ["Recipe", "TwoFour", "compress", "two_four"]
