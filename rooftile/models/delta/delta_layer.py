"""A layer with a gated delta net, and what it has beside a feed-forward.

    [q k v, z, b, a] = in_proj u
    y                = what the caller mixes: convolution and recurrence, of [q k v], b and a
    out              = out_proj(RMSNorm(y) w silu(z)), each head by itself

Yang et al., Gated Delta Networks, arXiv:2412.06464.
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
from rooftile.models.projection import Multiply, Projection
from rooftile.numerics import QuantisedRows


class DeltaLayer(Layer):
    """A layer whose mixer reads what the convolution reads, and the logits of beta and of the decays.

    The mixer takes the convolution's weights (2 Hk Dk + Hv Dv, K), and A_log and dt_bias (Hv,), which are in fp32: the
    exponential of a rounded decay is another decay.
    """

    conv_bias: None = None

    def __init__(self, config: ModelConfig, n: int, placement: Placement, *, waits: bool = False) -> None:
        super().__init__(config, n, placement, waits=waits)
        config = self.config
        assert config.delta is not None
        sizes = self.sizes = config.delta
        self.into = Projection(sizes.projected, config.hidden, bias=False, placement=placement, waits=waits)
        self.conv_weight = placement.parameter(sizes.convolved, sizes.kernel)
        precise = placement._replace(dtype=torch.float32)
        self.A_log, self.dt_bias = (precise.parameter(sizes.value_heads) for _ in range(2))
        # one number for each of a head, whatever kind the other norms are
        self.norm_weight = placement.parameter(sizes.value_dim)
        self.o = Projection(config.hidden, sizes.width, bias=False, placement=placement, waits=waits, summed=True)

    @property
    def reader(self) -> Projection:
        return self.into

    def draw(self, generator: torch.Generator) -> None:
        draw_decays(self.A_log, self.dt_bias, generator)
        self.norm_weight.fill_(1.0)

    def mix(
        self, n: int, x: Tensor | QuantisedRows, rotation: Rotation | None, attend: Attend, multiply: Multiply = functional.linear
    ) -> Tensor:
        qkv, z, b, a = self._split(self.into(x, multiply))
        sizes, y = self.sizes, attend(n, qkv, b, a).flatten(1)
        # each head by itself, and the norm before the gate, as in every checkpoint
        y = rms_norm_gated(y, z, self.norm_weight, groups=sizes.value_heads, gate_first=False, eps=sizes.norm_eps)
        return self._output(y, multiply)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns queries, keys and values side by side; gates; and the logits of beta and of the decays."""
        sizes = self.sizes
        if not sizes.by_key_head:
            qkv, z, b, a = projected.split((sizes.convolved, sizes.width, sizes.value_heads, sizes.value_heads), dim=-1)
            return qkv, z, b, a
        each = sizes.value_heads // sizes.key_heads
        wide, narrow = projected.split((sizes.convolved + sizes.width, 2 * sizes.value_heads), dim=-1)
        wide, narrow = (part.unflatten(-1, (sizes.key_heads, -1)) for part in (wide, narrow))
        *qkv, z = wide.split((sizes.key_dim, sizes.key_dim, each * sizes.value_dim, each * sizes.value_dim), dim=-1)
        b, a = narrow.split(each, dim=-1)
        # side by side, as the convolution's weights are
        return torch.cat([part.flatten(1) for part in qkv], dim=-1), z.flatten(1), b.flatten(1), a.flatten(1)
