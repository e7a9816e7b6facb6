"""A layer with Mamba-2, and what it has beside a feed-forward.

    [z, x B C, dt] = in_proj u
    y              = what the caller mixes: convolution and recurrence, of [x B C] and dt
    out            = out_proj(RMSNorm(y silu(z)) w), each group by itself

Dao and Gu, Transformers are SSMs, arXiv:2405.21060.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.fused.gated_norm import rms_norm_gated
from rooftile.fused.rope import Rotation
from rooftile.models.config import ModelConfig
from rooftile.models.decays import draw_decays
from rooftile.models.layers import Attend, Layer
from rooftile.models.placement import Placement
from rooftile.models.projection import Multiply, Norm, Projection
from rooftile.models.split_norms import gated_norm_of_part
from rooftile.numerics import QuantisedRows


class Mamba2Layer(Layer):
    """A layer whose mixer reads what the convolution reads, and time steps.

    The mixer takes the convolution's weights (W + 2 G N, K) and bias, and A_log, D and dt_bias (H,), which are in fp32: the
    exponential of a rounded decay is another decay.
    """

    def __init__(self, config: ModelConfig, n: int, placement: Placement, *, waits: bool = False) -> None:
        super().__init__(config, n, placement, waits=waits)
        whole, config = config, self.config
        assert config.mamba2 is not None
        assert whole.mamba2 is not None
        sizes = self.sizes = config.mamba2
        # several ranks hold parts of a group if there are fewer groups than ranks
        self.whole_norms = whole.mamba2.norms
        self.into = Projection(sizes.projected, config.hidden, bias=sizes.bias, placement=placement, waits=waits)
        self.conv_weight = placement.parameter(sizes.convolved, sizes.kernel)
        self.conv_bias = placement.parameter(sizes.convolved) if sizes.conv_bias else None
        precise = placement._replace(dtype=torch.float32)
        self.A_log, self.D, self.dt_bias = (precise.parameter(sizes.heads) for _ in range(3))
        self.gated_norm = Norm(config, sizes.width, placement=placement)
        self.o = Projection(config.hidden, sizes.width, bias=sizes.bias, placement=placement, waits=waits, summed=True)

    @property
    def reader(self) -> Projection:
        return self.into

    def draw(self, generator: torch.Generator) -> None:
        draw_decays(self.A_log, self.dt_bias, generator)
        self.D.fill_(1.0)

    def mix(
        self, n: int, x: Tensor | QuantisedRows, rotation: Rotation | None, attend: Attend, multiply: Multiply = functional.linear
    ) -> Tensor:
        sizes = self.sizes
        z, xBC, dt = self.into(x, multiply).split((sizes.width, sizes.convolved, sizes.heads), dim=-1)
        y = attend(n, xBC, dt)
        return self._output(self._normalised(y.flatten(1), z), multiply)

    def _normalised(self, y: Tensor, z: Tensor) -> Tensor:
        """Returns y silu(z), normalised in groups: the gate comes before the norm, as in every checkpoint."""
        norm = self.gated_norm
        if self.whole_norms < self.placement.ranks:
            return gated_norm_of_part(y, z, norm, self.whole_norms, self.placement)
        return rms_norm_gated(y, z, norm.weight, groups=self.sizes.norms, eps=norm.eps)
