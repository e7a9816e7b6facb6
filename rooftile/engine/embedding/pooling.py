"""Vectors of packed texts, out of the hidden states of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pool(hidden: Tensor, cu: Tensor, kinds: Sequence[str]) -> Tensor:
    """Returns the vectors (B, hidden * len(kinds)), in fp32, of hidden states (total, hidden) of texts that begin at cu.

    Args:
        hidden: hidden states.
        cu: (B + 1,): where texts begin, and the total.
        kinds: names out of `rooftile.engine.embedding.folder.POOLINGS`, whose vectors are joined.
    """
    found = [_pooled(hidden, cu.long(), kind) for kind in kinds]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _pooled(hidden: Tensor, cu: Tensor, kind: str) -> Tensor:
    if kind == "cls":
        return hidden.index_select(0, cu[:-1]).float()
    if kind == "lasttoken":
        return hidden.index_select(0, cu[1:] - 1).float()
    lengths = cu.diff()
    if kind == "max":
        return _reduced(hidden.float(), "max", lengths)
    if kind == "weightedmean":
        # token n of a text has the weight n + 1
        starts = cu[:-1].repeat_interleave(lengths, output_size=len(hidden))
        weights = torch.arange(1, len(hidden) + 1, device=hidden.device) - starts
        total = lengths * (lengths + 1) / 2
        return _reduced(hidden.float() * weights[:, None], "sum", lengths) / total[:, None]
    mean = _reduced(hidden.float(), "mean", lengths)
    return mean if kind == "mean" else mean * lengths.sqrt()[:, None]


def _reduced(x: Tensor, how: str, lengths: Tensor) -> Tensor:
    # unsafe: the lengths are ours, and to check them would wait for the device
    return torch.segment_reduce(x, how, lengths=lengths, axis=0, unsafe=True)
