"""A layer with Performer's attention, and what it has beside a feed-forward."""

from __future__ import annotations

import torch

from rooftile.approximate import Features
from rooftile.models.attention_layer import AttentionLayer
from rooftile.models.config import ModelConfig
from rooftile.models.placement import Placement


class PerformerLayer(AttentionLayer):
    """A layer whose mixer reads queries, keys and values, and takes the features of a projection (rows, D), which is in fp32."""

    def __init__(self, config: ModelConfig, n: int, placement: Placement, *, waits: bool = False) -> None:
        super().__init__(config, n, placement, waits=waits)
        assert config.performer is not None
        self.kind = config.performer.kind
        self.projection = placement._replace(dtype=torch.float32).parameter(config.performer.rows, config.head_dim)

    @property
    def features(self) -> Features:
        """The features of queries and keys."""
        return Features(self.projection, self.kind)

    def draw(self, generator: torch.Generator) -> None:
        self.features.redraw(int(torch.randint(1 << 31, (), generator=generator, device=generator.device)))
