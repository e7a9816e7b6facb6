"""The head of a cross-encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rooftile.fused.norm import normalise
from rooftile.models.config import ModelConfig
from rooftile.models.encoders.sizes import HeadSizes
from rooftile.models.feed_forward import UNGATED
from rooftile.models.placement import Placement
from rooftile.models.projection import Norm, Projection


class ScoreHead(nn.Module):
    """Turns a pooled vector into one score per label: a projection, an activation, a norm or none, and another projection."""

    def __init__(self, config: ModelConfig, sizes: HeadSizes, placement: Placement) -> None:
        super().__init__()
        self.sizes = sizes
        self.dense = Projection(config.hidden, config.hidden, bias=sizes.bias, placement=placement)
        self.norm = Norm(config, config.hidden, placement=placement) if sizes.norm else None
        self.out = Projection(sizes.labels, config.hidden, bias=True, placement=placement)

    def forward(self, pooled: Tensor) -> Tensor:
        """Returns the logits (B, labels) of pooled vectors (B, hidden)."""
        x = self.dense(pooled)
        x = torch.tanh(x) if self.sizes.activation == "tanh" else UNGATED[self.sizes.activation](x)
        logits: Tensor = self.out(x if self.norm is None else normalise(x, self.norm))
        return logits
