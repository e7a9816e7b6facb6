"""Operations around attention: norms, gated activations and rotary positions, each in one pass over its rows, and a
batch-invariant linear projection.

Each file holds an operation's definition in plain PyTorch, its operator, and the choice between the definition and the Triton
kernel in `rooftile.fused.kernels`. Where a gradient is wanted, in forward mode and under transforms of `torch.func` the
definition runs, so that PyTorch sees each of its steps.
"""

from rooftile.fused.gated import ACTIVATIONS, gated
from rooftile.fused.linear import linear
from rooftile.fused.norm import Norm, add_norm, normalise
from rooftile.fused.rope import Rotation, rotate
from rooftile.fused.where import runs_on

__all__ = ["ACTIVATIONS", "Norm", "Rotation", "add_norm", "gated", "linear", "normalise", "rotate", "runs_on"]
