"""Memory-bound operations, each in one pass over its rows, and a batch-invariant linear projection.

With gradients of their own, for any leading shape: `rms_norm`, `rms_norm_gated`, `layer_norm`, `add_rms_norm`, `add_layer_norm`,
`swiglu`, `geglu`, `gated` (of one tensor), `rotary`, `softmax`, `cross_entropy` and `linear_cross_entropy`. Norms and gates have
a second function, such as `rms_norm_quantised`, which returns codes for `rooftile.linear`. What a model calls to decode is in
their files: `norm.normalise` and `norm.add_norm` (in place), `rope.rotate`. Where a gradient of these is wanted, their definition
runs.

Each file holds an operation's definition in plain PyTorch, its operator, and the choice between the definition and the Triton
kernel in `rooftile.fused.kernels`. In forward mode and under transforms of `torch.func` the definition runs, so that PyTorch sees
each of its steps.
"""

from rooftile.fused.gated import gated, geglu, swiglu
from rooftile.fused.gated_norm import rms_norm_gated
from rooftile.fused.linear import linear
from rooftile.fused.linear_loss import linear_cross_entropy
from rooftile.fused.loss import cross_entropy
from rooftile.fused.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from rooftile.fused.quantised import (
    add_layer_norm_quantised,
    add_rms_norm_quantised,
    gated_quantised,
    geglu_quantised,
    layer_norm_quantised,
    rms_norm_quantised,
    swiglu_quantised,
)
from rooftile.fused.rope import rotary
from rooftile.fused.softmax import softmax
from rooftile.numerics.activations import ACTIVATIONS

__all__ = [
    "ACTIVATIONS", "add_layer_norm", "add_layer_norm_quantised", "add_rms_norm", "add_rms_norm_quantised", "cross_entropy",
    "gated", "gated_quantised", "geglu", "geglu_quantised", "layer_norm", "layer_norm_quantised", "linear",
    "linear_cross_entropy", "rms_norm", "rms_norm_gated", "rms_norm_quantised", "rotary", "softmax", "swiglu", "swiglu_quantised",
]  # fmt: skip
