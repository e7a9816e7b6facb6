"""Norms of all kinds with random weights, and how near to its definition a kernel must come."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.models.config import config_of
from rooftile.models.placement import Placement
from rooftile.models.projection import Norm
from tests.models.checkpoints import CONFIGS

# the kind, and a family that has it
KINDS = {"rms": "llama", "plus one": "gemma2", "rounds once": "olmo2", "layer": "gpt2"}


def norm_of(kind: str, size: int, dtype: torch.dtype, device: str = "cpu", eps: float = 1e-2) -> Norm:
    """A norm whose weights are random and whose eps can be seen in the result."""
    config = config_of(CONFIGS[KINDS[kind]]().to_dict(), "here")
    norm = Norm(config, size, placement=Placement(dtype, torch.device(device)))
    norm.eps = eps
    norm.weight.copy_(torch.randn(size))
    if norm.bias is not None:
        norm.bias.copy_(torch.randn(size))
    return norm


def assert_within_an_ulp(found: Tensor, due: Tensor, *, of: float = 2.0, also: Tensor | float | None = None) -> None:
    """At most `of` units in the last place (two are rounded in a row; fp32: 8) and `also` apart.

    Without `also`, what is rounded is mostly equal.
    """
    assert found.dtype == due.dtype
    assert found.shape == due.shape
    assert torch.equal(found.isnan(), due.isnan())
    eps, size = torch.finfo(due.dtype).eps, due.double().abs()
    if due.dtype == torch.float32:
        size, of = size + size.mean(), 8.0
    else:
        # near zero a sum of numbers around one is as good as fp32 is there; and the smallest numbers have a unit of their own
        if also is None and due.numel() > 1000:
            assert (found != due).float().mean() < 0.01
        also = (0.0 if also is None else also) + 1e-6 + torch.finfo(due.dtype).smallest_normal * eps
    apart = (found.double() - due.double()).abs()
    assert (apart <= of * eps * size + (0.0 if also is None else also)).all(), (apart / (eps * size)).max()
