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
from rooftile.moe.problem import ELSEWHERE
from rooftile.numerics import QuantisedRows
from rooftile.weights import QuantisedWeight

# the weights that may be quantised
QUANTISED = ("up", "down", "shared_up", "shared_down")


class ExpertFeedForward(FeedForward):
    """A router, experts, and a network that all tokens share, where the model has one. Gate rows come first.

    Weights may be quantised (`rooftile.moe.quantised`); `waits` makes a feed-forward whose QUANTISED ones come later (`fill`).
    """

    up: Tensor | QuantisedWeight  # (E, 2 h, d)
    down: Tensor | QuantisedWeight  # (E, d, h)
    shared_up: Tensor | QuantisedWeight | None
    shared_down: Tensor | QuantisedWeight | None

    def __init__(self, config: ModelConfig, placement: Placement, *, waits: bool = False) -> None:
        super().__init__(config, placement)
        config = placement.part(config)
        assert config.experts is not None
        sizes = self.sizes = config.experts
        d, E, s = config.hidden, sizes.held, sizes.shared
        new = placement.parameter
        self.first = placement.rank * E if sizes.ranks > 1 else 0
        """The number of the first expert that this rank holds."""
        every = torch.arange(sizes.experts, dtype=torch.int32, device=placement.device) - self.first
        self.places = every.masked_fill_((every < 0) | (every >= E), ELSEWHERE)
        """The place of each expert among those that this rank holds, or ELSEWHERE."""
        self.centroids = new(sizes.experts, d)
        self.router_bias = new(sizes.experts) if sizes.router_bias else None
        # a rounded bias would choose other experts
        wide = placement._replace(dtype=torch.float32)
        self.selection_bias = wide.parameter(sizes.experts) if sizes.selection_bias else None
        self.up_bias = new(E, sizes.rows) if sizes.biases else None
        self.down_bias = new(E, d) if sizes.biases else None
        self.shapes: dict[str, tuple[int, ...]] = {"up": (E, sizes.rows, d), "down": (E, d, sizes.hidden)}
        if s:
            self.shapes |= {"shared_up": (sizes.shared_rows, d), "shared_down": (d, s)}
        for name in QUANTISED:
            setattr(self, name, None)
            if name in self.shapes and not waits:
                self.fill(name, None)
        self.shared_gate = new(d) if sizes.shared_gate else None

    def fill(self, name: str, weight: QuantisedWeight | None) -> None:
        """Takes a quantised weight, or with None makes an uninitialised plain one."""
        # a parameter of that name, if there is one, would hide the weight
        delattr(self, name)
        setattr(self, name, self.placement.parameter(*self.shapes[name]) if weight is None else weight)

    def compute(self, x: Tensor | QuantisedRows, multiply: Multiply) -> Tensor:
        assert isinstance(x, Tensor), "experts ask for no codes"
        # another product than PyTorch's is the batch-invariant one; None follows torch
        deterministic = None if multiply is functional.linear else True
        routing = moe.route(
            x, self.centroids, self.sizes.router, bias=self.selection_bias, logit_bias=self.router_bias,
            deterministic=deterministic,
        )  # fmt: skip
        is_dealt = self.sizes.ranks > 1
        if is_dealt:
            here = self.places.index_select(0, routing.experts.flatten()).view(routing.experts.shape)
            routing = routing._replace(experts=here)
        return moe.experts(
            x, routing, self.up, self.down, activation=self.sizes.activation, deterministic=deterministic,
            # the ranks add up what they compute, so only one of them adds the bias of an expert
            up_bias=self.up_bias, down_bias=self.down_bias if is_dealt or not self.placement.rank else None,
            shared_up=self.shared_up, shared_down=self.shared_down, shared_gate=self.shared_gate,
        )  # fmt: skip
