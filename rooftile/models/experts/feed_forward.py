"""A feed-forward with experts.

    y = sum over the chosen experts of gate_i down_i act(up_i x), plus the network that all tokens share

DeepSeekMoE, arXiv:2401.06066.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rooftile import moe
from rooftile.models.config import ModelConfig
from rooftile.models.feed_forward import FeedForward
from rooftile.models.placement import Placement
from rooftile.models.projection import Multiply
from rooftile.numerics import QuantisedRows


class ExpertFeedForward(FeedForward):
    """A router, experts, and a network that all tokens share, where the model has one. Gate rows come first."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__(config)
        assert config.experts is not None
        sizes = self.sizes = config.experts
        d, E, h, s = config.hidden, sizes.experts, sizes.hidden, sizes.shared
        new = placement.parameter
        self.centroids, self.up, self.down = new(E, d), new(E, sizes.rows, d), new(E, d, h)
        self.router_bias = new(E) if sizes.router_bias else None
        # a rounded bias would choose other experts
        self.selection_bias = placement._replace(dtype=torch.float32).parameter(E) if sizes.selection_bias else None
        self.up_bias = new(E, sizes.rows) if sizes.biases else None
        self.down_bias = new(E, d) if sizes.biases else None
        self.shared_up = new(sizes.shared_rows, d) if s else None
        self.shared_down = new(d, s) if s else None
        self.shared_gate = new(d) if sizes.shared_gate else None

    def compute(self, x: Tensor | QuantisedRows, multiply: Multiply) -> Tensor:
        assert isinstance(x, Tensor), "experts ask for no codes"
        # another product than PyTorch's is the batch-invariant one; None follows torch
        deterministic = None if multiply is functional.linear else True
        routing = moe.route(
            x, self.centroids, self.sizes.router, bias=self.selection_bias, logit_bias=self.router_bias,
            deterministic=deterministic,
        )  # fmt: skip
        return moe.experts(
            x, routing, self.up, self.down, activation=self.sizes.activation, deterministic=deterministic,
            up_bias=self.up_bias, down_bias=self.down_bias, shared_up=self.shared_up, shared_down=self.shared_down,
            shared_gate=self.shared_gate,
        )  # fmt: skip
