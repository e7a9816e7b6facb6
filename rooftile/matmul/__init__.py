"""Products with quantised weights.

formats     the words, and what shares a scale
weight      `QuantisedWeight`, and the numbers that it stands for
quantise    `quantise_weight`
packing     two codes per byte
definition  the product in plain operations
product     the operators, with gradients
gated       a product whose halves are a gate and what it gates
backends    what runs it, with refusals
library     PyTorch's own products
kernels     Triton
hopper      Gluon
two_four    2:4 weights
"""

from rooftile.matmul.formats import WEIGHT_FORMATS, WeightFormat, weight_format
from rooftile.matmul.gated import multiply_gated, multiply_gated_rows
from rooftile.matmul.product import dequantise, multiply
from rooftile.matmul.quantise import quantise_weight
from rooftile.matmul.weight import QuantisedWeight

__all__ = [
    "WEIGHT_FORMATS", "QuantisedWeight", "WeightFormat", "dequantise", "multiply", "multiply_gated",
    "multiply_gated_rows", "quantise_weight", "weight_format",
]  # fmt: skip
