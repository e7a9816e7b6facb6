"""`Placement`: how and where the tensors of a model are made."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class Placement(NamedTuple):
    """The dtype and device of a model's tensors, and this process's rank among those that share the model.

    Today one process has the whole model: rank 0 of 1.
    """

    dtype: torch.dtype
    device: torch.device
    rank: int = 0
    ranks: int = 1

    def parameter(self, *size: int) -> nn.Parameter:
        """Returns an uninitialised parameter, to be filled with weights later; it has no gradient."""
        return nn.Parameter(torch.empty(size, dtype=self.dtype, device=self.device), requires_grad=False)
