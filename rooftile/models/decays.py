"""Decays and time steps of a recurrence as a training begins with them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# a token's state halves after some tens to some thousands of steps
RATES, STEPS = (1.0, 16.0), (1e-3, 0.1)


def draw_decays(A_log: Tensor, dt_bias: Tensor, generator: torch.Generator) -> None:
    """Draws rates of decay from -16 to -1, and biases whose softplus is a time step from 0.001 to 0.1, uniform in its logarithm.

    With numbers near 0 in their place a state would forget a token after two more.
    """
    A_log.uniform_(*RATES, generator=generator).log_()
    steps = dt_bias.uniform_(*map(math.log, STEPS), generator=generator).exp_()
    # softplus of it is the step again
    dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))
