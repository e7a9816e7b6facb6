"""Merging what several ranks have found over their keys."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.exact import reference
from rooftile.runtime.devices import runs_kernels


def merge(parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns o (n, H, D) over the keys of all ranks, in `dtype`.

    Args:
        parts: fp32 (ranks, n, H, D + 1): o over each rank's keys, and the lse behind it.
        sinks: (H,); None without.
        dtype: the dtype of o.
    """
    if runs_kernels(parts):
        # here and not above: a CPU has no use for Triton
        from rooftile.engine.mixers.exact import merge_kernels

        return merge_kernels.merge(parts, sinks, dtype)
    return merge_as_defined(parts, sinks, dtype)


def merge_as_defined(parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Does what `merge` does, in torch on any device."""
    o, lse = reference.merge([(part[..., :-1], part[..., -1].T) for part in parts])
    if sinks is not None:
        # a sink is one more score, whose value is 0; one of -inf beside no key changes nothing
        o = o * torch.sigmoid(lse.T - sinks.float()).nan_to_num(nan=0.0)[..., None]
    return o.to(dtype)
