"""Recurrences over a state of fixed size: state-space models, the gated delta rule, causal convolution, linear attention.

    from rooftile import recurrent as rec
    y, state = rec.ssd(x, dt, A, B, C, D=D)                # Mamba-2: x (B, T, H, P), state (B, H, P, N)
    y, state = rec.selective_scan(x, dt, A, B, C, D=D)     # Mamba-1: x (B, T, W), state (B, W, N)
    y, state = rec.gated_delta(q, k, v, g, beta)           # gated delta net: v (B, T, Hv, Dv), state (B, Hv, Dk, Dv)
    y, tail = rec.causal_conv(x, weight, bias)             # x (B, T, W), tail (B, W, K - 1)
    y = rec.ssd_step(state, x, dt, A, B, C, D=D)           # one token of each sequence; the state is changed in place

Inside:

rule         what a recurrence is: its tensors, its options, and one piece of it in plain operations
walk         forward and backward piece by piece, of dense and packed sequences
operator     the operators of a rule, with their gradient
arguments    the checks of a caller's tensors
modules/     layers: Mamba, Mamba2, GatedDeltaNet (`rooftile.nn`)
linear/      linear attention with feature maps
split/       sequences that several ranks hold
"""

from typing import TYPE_CHECKING

from rooftile.runtime.late_names import late_names

if TYPE_CHECKING:
    from rooftile.recurrent.convolution import causal_conv, conv_step
    from rooftile.recurrent.delta import gated_delta, gated_delta_plan, gated_delta_step
    from rooftile.recurrent.selective import selective_scan, selective_scan_step
    from rooftile.recurrent.state_space import ssd, ssd_plan, ssd_step

__all__ = [
    "causal_conv",
    "conv_step",
    "gated_delta",
    "gated_delta_plan",
    "gated_delta_step",
    "selective_scan",
    "selective_scan_step",
    "ssd",
    "ssd_plan",
    "ssd_step",
]

__getattr__ = late_names(
    "rooftile.recurrent",
    {
        "causal_conv": "rooftile.recurrent.convolution", "conv_step": "rooftile.recurrent.convolution",
        "gated_delta": "rooftile.recurrent.delta", "gated_delta_plan": "rooftile.recurrent.delta",
        "gated_delta_step": "rooftile.recurrent.delta",
        "selective_scan": "rooftile.recurrent.selective", "selective_scan_step": "rooftile.recurrent.selective",
        "ssd": "rooftile.recurrent.state_space", "ssd_plan": "rooftile.recurrent.state_space",
        "ssd_step": "rooftile.recurrent.state_space",
    },
)  # fmt: skip
