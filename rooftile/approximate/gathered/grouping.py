"""The choices of Reformer and Routing in kernels, where these run; otherwise plain operations make them."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.approximate.gathered.attention import refusal
from rooftile.runtime.launch import device_of
from rooftile.runtime.operators import transforms_active

# the scores of a cluster that a program holds in registers
MOST_SCORES = 32768


def can_choose(x: Tensor) -> bool:
    """Whether the kernels make the choices for x (B, T, H, D): not inside a compiled graph, nor under a transform."""
    return not torch.compiler.is_compiling() and not transforms_active() and refusal(x, x) is None


def hashes(x: Tensor, random: Tensor) -> Tensor:
    """The hashes (B, T, H, rounds) int32 of x (B, T, H, D): argmax [x R; -x R], from random vectors (H, D, rounds, half)."""
    from rooftile.approximate.gathered.kernels import grouping

    x = x.detach()
    with device_of(x):
        return grouping.hashes(x if x.stride(-1) == 1 else x.contiguous(), random.contiguous())


def best_members(x: Tensor, centroids: Tensor, width: int) -> Tensor | None:
    """The places (B, H, c, width) of the best tokens of x (B, T, Hk, D) for centroids (H, c, D), rising; None for longer texts.

    Scored in fp32 with layer-normed tokens, ties to the lower place.
    """
    if x.shape[1] > MOST_SCORES:
        return None
    from rooftile.approximate.gathered.kernels import grouping

    x = x.detach()
    with device_of(x):
        return grouping.best(grouping.scores(x if x.stride(-1) == 1 else x.contiguous(), centroids.float().contiguous()), width)
