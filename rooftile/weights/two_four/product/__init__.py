"""Products with 2:4 weights.

definition  the product in plain operations
operators   x times a `TwoFour`, with gradients for x and the bias
masked      x times a masked weight that is trained, with gradients for all three
dispatch    what runs a product, with refusals
cusparselt  NVIDIA's library, for many rows
few_rows    Triton, for few rows
hopper      Gluon's kernel for few rows
transposed  turns results of cuSPARSELt
"""

from rooftile.weights.two_four.product.masked import multiply_masked
from rooftile.weights.two_four.product.operators import multiply_two_four

__all__ = ["multiply_masked", "multiply_two_four"]
