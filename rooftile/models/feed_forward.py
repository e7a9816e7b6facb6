"""A layer's feed-forward: the interface of every kind, and the dense one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from rooftile.fused import ACTIVATIONS
from rooftile.models.config import ModelConfig
from rooftile.models.placement import Placement
from rooftile.models.projection import InputFormat, Multiply, Projection
from rooftile.numerics import QuantisedRows

# without a gate there is one more: the square of ReLU (Nemotron-H)
UNGATED: dict[str, Callable[[Tensor], Tensor]] = {**ACTIVATIONS, "relu2": lambda x: functional.relu(x).square()}


class FeedForward(nn.Module):
    """The part of a layer that follows the mixing of tokens, and that each token goes through by itself.

    Args:
        config: the whole model.
        placement: where its tensors are, and which part of them.
    """

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.placement, self.scale = placement, config.residual_scale

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The projections that a checkpoint may have quantised."""
        return ()

    def rows(self, x: Tensor) -> InputFormat:
        """Returns how `forward` wants its input, computed from x."""
        return InputFormat()

    def forward(self, x: Tensor | QuantisedRows, multiply: Multiply = functional.linear) -> Tensor:
        """Returns what it adds to the residual stream, before its post norm; x (total, hidden) is normalised."""
        y = self.placement.summed(self.compute(x, multiply))
        return y if self.scale is None else y * self.scale

    def compute(self, x: Tensor | QuantisedRows, multiply: Multiply) -> Tensor:
        """Returns the output of the network (total, hidden), or of the part that this rank holds."""
        raise NotImplementedError


class DenseFeedForward(FeedForward):
    """Two projections with an activation between them, or a gated one: then gate and up are one projection, gate rows first."""

    def __init__(self, config: ModelConfig, placement: Placement, *, waits: bool = False) -> None:
        super().__init__(config, placement)
        config = placement.part(config)
        hidden, ffn, bias = config.hidden, config.ffn, config.mlp_bias
        self.activation, self.gated = config.activation, config.gated
        self.up = Projection(2 * ffn if self.gated else ffn, hidden, bias=bias, placement=placement, waits=waits)
        self.down = Projection(hidden, ffn, bias=bias, placement=placement, waits=waits, summed=True)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.up, self.down

    def rows(self, x: Tensor) -> InputFormat:
        return self.up.rows(x)

    def compute(self, x: Tensor | QuantisedRows, multiply: Multiply) -> Tensor:
        if self.gated:
            inner = self.up.gated(x, self.activation, self.down, multiply)
        else:
            inner = UNGATED[self.activation](self.up(x, multiply))
        return self.down(inner, multiply)
