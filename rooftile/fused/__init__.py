"""Memory-bound operations, each in one pass over its rows, and a batch-invariant linear projection.

With gradients of their own, for any leading shape: `rms_norm`, `layer_norm`, `add_rms_norm`, `add_layer_norm`, `swiglu`, `geglu`,
`rotary`, `softmax`, `cross_entropy` and `linear_cross_entropy`. For decoding: `normalise`, `add_norm` (in place), `gated` and
`rotate`; where a gradient of these is wanted, their definition runs.

Each file holds an operation's definition in plain PyTorch, its operator, and the choice between the definition and the Triton
kernel in `rooftile.fused.kernels`. In forward mode and under transforms of `torch.func` the definition runs, so that PyTorch sees
each of its steps.
"""

from rooftile.fused.gated import gated, geglu, swiglu
from rooftile.fused.linear import linear
from rooftile.fused.linear_loss import linear_cross_entropy
from rooftile.fused.loss import cross_entropy
from rooftile.fused.norm import Norm, add_norm, normalise
from rooftile.fused.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from rooftile.fused.rope import Rotation, rotary, rotate
from rooftile.fused.softmax import softmax
from rooftile.numerics.activations import ACTIVATIONS

__all__ = [
    "ACTIVATIONS", "Norm", "Rotation", "add_layer_norm", "add_norm", "add_rms_norm", "cross_entropy", "gated", "geglu",
    "layer_norm", "linear", "linear_cross_entropy", "normalise", "rms_norm", "rotary", "rotate", "softmax", "swiglu",
]  # fmt: skip
