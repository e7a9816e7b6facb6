"""A layer with Mamba-1, and what it has beside a feed-forward.

    [x, z]     = in_proj u
    y          = what the caller mixes: convolution of x, time steps, B and C out of that (`selection`), and recurrence
    out        = out_proj(y silu(z))

Gu and Dao, Mamba, arXiv:2312.00752.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooftile.fused.norm import normalise
from rooftile.fused.rope import Rotation
from rooftile.models.config import ModelConfig
from rooftile.models.decays import draw_decays
from rooftile.models.layers import Attend, Layer
from rooftile.models.placement import Placement
from rooftile.models.projection import Multiply, Norm, Projection
from rooftile.numerics import QuantisedRows


class MambaLayer(Layer):
    """A layer whose mixer reads what the convolution reads.

    The mixer takes the convolution's weights (W, K) and bias, the selection, and A_log (W, N), D and dt_bias (W,), which are in
    fp32: the exponential of a rounded decay is another decay.
    """

    def __init__(self, config: ModelConfig, n: int, placement: Placement, *, waits: bool = False) -> None:
        super().__init__(config, n, placement, waits=waits)
        config = self.config
        assert config.mamba is not None
        sizes = self.sizes = config.mamba
        self.into = Projection(sizes.projected, config.hidden, bias=sizes.bias, placement=placement, waits=waits)
        self.conv_weight = placement.parameter(sizes.width, sizes.kernel)
        self.conv_bias = placement.parameter(sizes.width) if sizes.conv_bias else None
        self.select = placement.parameter(sizes.rank + 2 * sizes.state, sizes.width)
        self.widen = placement.parameter(sizes.width, sizes.rank)
        normed = (sizes.rank, sizes.state, sizes.state) if sizes.selection_norms else ()
        norms = nn.ModuleList(Norm(config, size, placement=placement) for size in normed)
        # a ModuleList is a sequence of its modules, but torch's types do not say so
        self.selection_norms = cast("Sequence[Norm]", norms)
        for norm in self.selection_norms:
            # a norm without weights multiplies by ones, which no checkpoint has
            norm.weight.fill_(1.0)
            norm.eps = sizes.selection_eps
        precise = placement._replace(dtype=torch.float32)
        self.A_log = precise.parameter(sizes.width, sizes.state)
        self.D, self.dt_bias = precise.parameter(sizes.width), precise.parameter(sizes.width)
        self.o = Projection(config.hidden, sizes.width, bias=sizes.bias, placement=placement, waits=waits, summed=True)

    @property
    def reader(self) -> Projection:
        return self.into

    def draw(self, generator: torch.Generator) -> None:
        draw_decays(self.A_log, self.dt_bias, generator)
        self.D.fill_(1.0)

    def selection(self, x: Tensor, multiply: Multiply = functional.linear) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the time steps (total, W) without their bias, B and C (total, N), of what the convolution gave (total, W)."""
        sizes = self.sizes
        dt, B, C = self.placement.summed(multiply(x, self.select, None)).split((sizes.rank, sizes.state, sizes.state), dim=-1)
        if self.selection_norms:
            dt, B, C = (normalise(part, norm) for part, norm in zip((dt, B, C), self.selection_norms, strict=True))
        return multiply(dt, self.widen, None), B, C

    def mix(
        self, n: int, x: Tensor | QuantisedRows, rotation: Rotation | None, attend: Attend, multiply: Multiply = functional.linear
    ) -> Tensor:
        x, z = self.into(x, multiply).chunk(2, dim=-1)
        return self._output(attend(n, x) * functional.silu(z), multiply)
