"""FLOPs and bytes of recurrences over a state of fixed size, and of one step of them.

Each token adds to the state and reads it: that is the least work, which no form in pieces can undercut. A scan with one decay for
each number of the state has no matrix products, and neither has a convolution of each channel by itself.
"""

from __future__ import annotations

from torch import Tensor

# products of a key's width times a value's for each token and head: the backward also makes the state again, and its gradient
SSD, DELTA = {"fwd": 2, "bwd": 5}, {"fwd": 3, "bwd": 8}


def ssd_flops(x: Tensor, state: Tensor, phase: str) -> int:
    """Returns the FLOPs of `rooftile.recurrent.ssd` on x (..., H, P) with states (..., P, N); phase: "fwd" or "bwd"."""
    return 2 * SSD[phase] * x.numel() * state.shape[-1]


def delta_flops(v: Tensor, state: Tensor, phase: str) -> int:
    """Returns the FLOPs of `rooftile.recurrent.gated_delta` on v (..., Hv, Dv) with states (..., Dk, Dv)."""
    return 2 * DELTA[phase] * v.numel() * state.shape[-2]


def touched_bytes(state: Tensor, x: Tensor) -> int:
    """Returns the bytes of the states that a step of the tokens x (S, ...) reads, and writes again."""
    return x.shape[0] * state[:1].numel() * state.itemsize
