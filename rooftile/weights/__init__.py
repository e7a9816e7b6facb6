"""Quantised and 2:4 weights, and products with them.

formats     the words, and what shares a scale
weight      `QuantisedWeight`, and the numbers that it stands for
quantise    `quantise_weight`
packing     two codes per byte
definition  the product in plain operations
product     the operators, with gradients
gated       a product whose halves are a gate and what it gates
linear      `rooftile.linear`
dispatch    what runs a product, with refusals
library     PyTorch's own products
triton      kernels in Triton
hopper      kernels in Gluon
two_four    2:4 weights (`rooftile.sparsity`), and their product
files       how checkpoints store such weights
"""

from typing import TYPE_CHECKING

from rooftile.runtime.late_names import late_names

if TYPE_CHECKING:
    from rooftile.weights.formats import WEIGHT_FORMATS, WeightFormat, weight_format
    from rooftile.weights.gated import multiply_gated, multiply_gated_rows
    from rooftile.weights.product import dequantise, multiply
    from rooftile.weights.quantise import quantise_weight
    from rooftile.weights.weight import QuantisedWeight

__all__ = [
    "WEIGHT_FORMATS", "QuantisedWeight", "WeightFormat", "dequantise", "multiply", "multiply_gated",
    "multiply_gated_rows", "quantise_weight", "weight_format",
]  # fmt: skip

# late: the settings of a checkpoint are read where there is no torch
__getattr__ = late_names(
    "rooftile.weights",
    {
        **dict.fromkeys(("WEIGHT_FORMATS", "WeightFormat", "weight_format"), "rooftile.weights.formats"),
        **dict.fromkeys(("multiply_gated", "multiply_gated_rows"), "rooftile.weights.gated"),
        **dict.fromkeys(("dequantise", "multiply"), "rooftile.weights.product"),
        "QuantisedWeight": "rooftile.weights.weight", "quantise_weight": "rooftile.weights.quantise",
    },
)  # fmt: skip
