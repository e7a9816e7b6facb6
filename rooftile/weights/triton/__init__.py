"""Triton kernels of products with quantised weights, for Ampere and newer.

    unpacked     weights dequantised: in the tile of a product, and as a whole
    weight_only  activations in 16 bits times weights that are dequantised in the kernel
    scaled       FP8 and INT8 activations and weights
    launch       the table of tiles, and the launches

Rows of activations are quantised by `rooftile.numerics.row_kernels`.
"""
