"""A layer with multi-head latent attention, and what it has beside a feed-forward.

    [q', c, r] = first u                        c = RMSNorm(c) w: the latent; r: the key that rotates, one for all heads
    q          = RMSNorm(q') w, projected       or q' itself, where queries are not compressed
    k_h, v_h   = K_h c and r, V_h c             for each head h
    out        = o(softmax(q_h k_h) v_h)

Nobody needs k and v of earlier tokens: <q, K c> = <K^T q, c>, and sum p V c = V sum p c. So c and r are all that is kept of a
token, and K and V move to the other side (the absorbed form).

DeepSeek-V2, arXiv:2405.04434.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from rooftile.fused.norm import normalise
from rooftile.fused.rope import Rotation, rotate
from rooftile.models.config import ModelConfig
from rooftile.models.layers import Attend, Layer
from rooftile.models.placement import Placement
from rooftile.models.projection import Multiply, Norm, Projection
from rooftile.numerics import QuantisedRows


class LatentLayer(Layer):
    """A layer whose mixer reads queries, and what it is to keep of each token."""

    def __init__(self, config: ModelConfig, n: int, placement: Placement, *, waits: bool = False) -> None:
        super().__init__(config, n, placement, waits=waits)
        config = self.config
        assert config.latent is not None
        sizes = self.sizes = config.latent
        H, hidden = config.heads, config.hidden

        def projection(outputs: int, inputs: int, *, bias: bool = False, summed: bool = False) -> Projection:
            return Projection(outputs, inputs, bias=bias, placement=placement, waits=waits, summed=summed)

        self.first = projection(sizes.first_queries(H) + sizes.kept, hidden, bias=sizes.bias)
        self.q_norm = self.queries = None
        if sizes.query_rank is not None:
            self.q_norm = Norm(config, sizes.query_rank, placement=placement)
            self.queries = projection(H * sizes.head_dim, sizes.query_rank)
        self.kv_norm = Norm(config, sizes.rank, placement=placement)
        for norm in (self.q_norm, self.kv_norm):
            if norm is not None:
                norm.eps = sizes.norm_eps
        self.keys_values = projection(H * (sizes.unrotated + sizes.value_dim), sizes.rank)
        self.o = projection(hidden, H * sizes.value_dim, bias=sizes.bias, summed=True)

    @property
    def reader(self) -> Projection:
        return self.first

    @property
    def projections(self) -> tuple[Projection, ...]:
        first, *rest = super().projections
        return first, *(one for one in (self.queries, self.keys_values) if one is not None), *rest

    def by_head(self) -> tuple[Tensor, Tensor]:
        """Returns what makes keys and values of a latent, (H, unrotated, rank) and (H, value_dim, rank), dequantised."""
        sizes = self.sizes
        both = self.keys_values.dequantised().unflatten(0, (self.config.heads, sizes.unrotated + sizes.value_dim))
        keys, values = both.split((sizes.unrotated, sizes.value_dim), dim=1)
        return keys, values

    def mix(
        self, n: int, x: Tensor | QuantisedRows, rotation: Rotation | None, attend: Attend, multiply: Multiply = functional.linear
    ) -> Tensor:
        sizes, H = self.sizes, self.config.heads
        q, latent, r = self.first(x, multiply).split((sizes.first_queries(H), sizes.rank, sizes.rotated), dim=-1)
        if self.q_norm is not None and self.queries is not None:
            q = self.queries(normalise(q, self.q_norm), multiply)
        q, turning = q.unflatten(-1, (H, sizes.head_dim)).split((sizes.unrotated, sizes.rotated), dim=-1)
        turning, r = self._rotated(turning, rotation), self._rotated(r[:, None], rotation)
        o = attend(n, q, turning, normalise(latent, self.kv_norm), r[:, 0])
        return self._output(o.flatten(1), multiply)

    def _rotated(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """Returns heads (total, heads, rotated) rotated; numbers of a pair are half a head apart then."""
        if rotation is None:
            return x
        if self.sizes.interleaved:
            # queries and keys alike, so that no product changes
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x, rotation)
