"""The experts in Triton kernels, forward and backward, for Ampere and newer, in bf16, fp16 and fp32.

    tiles        sizes of tiles, and compile-time arguments
    products     sorted rows times the weight of each row's expert, and the sum over a token's choices
    quantised    the same with quantised weights
    activations  activations and their gradients
    gradients    the backward's kernels
    forward, backward    the launches
    few_tokens   one to four tokens without gradients, in two launches
    routing      the router without gradients, in two launches

Nothing is read by the host. Every sum has one owner and one order. The shared network goes through PyTorch's products.
"""

from rooftile.moe.kernels.backward import backward
from rooftile.moe.kernels.forward import forward

__all__ = ["backward", "forward"]
