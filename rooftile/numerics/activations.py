"""Activations of gated feed-forward networks, in plain operations; `activated` has them in Triton."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    # Transformers spells out the formula of "gelu_new" and rounds at each of its steps; one kernel rounds once
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}
# the kernels' formula for each
KINDS = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "relu": "relu", "silu": "silu"}


def gated_halves(x: Tensor, activation: str) -> Tensor:
    """The activation of the first half of each row times its second half, rounded twice: (..., 2 F) to (..., F)."""
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up
