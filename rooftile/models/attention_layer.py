"""A layer with heads of attention, exact or of Native Sparse Attention, and what it has beside a feed-forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from rooftile.approximate import compress
from rooftile.fused.norm import normalise
from rooftile.fused.rope import Rotation
from rooftile.models.config import ModelConfig
from rooftile.models.layers import Attend, Layer
from rooftile.models.mixers import BRANCHES, MIXERS, NativeSparseSizes
from rooftile.models.placement import Placement
from rooftile.models.projection import InputFormat, Multiply, Norm, Projection
from rooftile.models.split_norms import normalise_parts
from rooftile.numerics import QuantisedRows


class Compression(nn.Module):
    """Maps a block of keys, or of values, to one: with an MLP, a linear map or the mean. Heads share the maps.

    Yuan et al., Native Sparse Attention, arXiv:2502.11089, section 3.3.1.
    """

    def __init__(self, sizes: NativeSparseSizes, dim: int, placement: Placement) -> None:
        super().__init__()
        self.length, self.stride = sizes.length, sizes.stride
        inner = sizes.length * dim
        # keys, then values
        self.places = None if sizes.compression == "mean" else placement.parameter(2, sizes.length, dim)
        self.up: Sequence[Projection] | None = None
        self.down: Sequence[Projection] | None = None
        if sizes.compression == "mlp":
            wide = 4 * dim if sizes.hidden is None else sizes.hidden
            self.up = _pair(wide, inner, placement)
            inner = wide
        if sizes.compression != "mean":
            self.down = _pair(dim, inner, placement)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights with their names in a checkpoint."""
        if self.places is not None:
            yield "places", self.places
        for part, projections in (("up", self.up), ("down", self.down)):
            for which, projection in zip("kv", projections or (), strict=False):
                yield from ((f"{which}_{part}.{name}", weight) for name, weight in projection.named_parameters())

    def forward(self, blocks: Tensor, which: int) -> Tensor:
        """Maps blocks of keys (which = 0) or values (1), (n, length, Hk, D), to (n, Hk, D)."""
        if self.places is None or self.down is None:
            return compress(blocks, length=self.length, stride=self.stride)[:, 0]
        down, up = self.down[which], None if self.up is None else self.up[which]

        def phi(x: Tensor) -> Tensor:
            # (..., length, D) to (..., D)
            x = x.flatten(-2)
            return down(x if up is None else functional.gelu(up(x)))

        return compress(blocks, length=self.length, stride=self.stride, phi=phi, places=self.places[which])[:, 0]


def _pair(outputs: int, inputs: int, placement: Placement) -> Sequence[Projection]:
    """Returns a projection for keys and one for values."""
    modules = nn.ModuleList(Projection(outputs, inputs, bias=True, placement=placement) for _ in range(2))
    # a ModuleList is a sequence of its modules, but torch's types do not say so
    return cast("Sequence[Projection]", modules)


class AttentionLayer(Layer):
    """A layer whose mixer reads queries, keys and values, which are one projection."""

    def __init__(self, config: ModelConfig, n: int, placement: Placement, *, waits: bool = False) -> None:
        super().__init__(config, n, placement, waits=waits)
        config = self.config
        mixer = config.mixers[n]
        sizes = config.native_sparse if mixer == "native_sparse" else None
        H, D, hidden = config.heads, config.head_dim, config.hidden
        Hk = self.kv_heads = MIXERS[mixer] * config.kv_heads
        # with gates each head has D rows of queries, then D of gates
        self.queries = 2 * H if config.attention_gate else H
        self.qkv = Projection((self.queries + 2 * Hk) * D, hidden, bias=config.qkv_bias, placement=placement, waits=waits)
        self.gates = None if sizes is None else Projection(BRANCHES * H, hidden, bias=True, placement=placement)
        self.compression = None if sizes is None else Compression(sizes, D, placement)
        self.o = Projection(hidden, H * D, bias=config.o_bias, placement=placement, waits=waits, summed=True)
        self.sinks = placement.parameter(H) if config.sinks else None
        per_head = not config.qk_norm_of_all_heads
        self.q_norm = Norm(config, D if per_head else H * D, placement=placement) if config.qk_norm else None
        self.k_norm = Norm(config, D if per_head else Hk * D, placement=placement) if config.qk_norm else None

    @property
    def reader(self) -> Projection:
        return self.qkv

    def rows_of_mixer(self, x: Tensor) -> InputFormat:
        # gates read it too, in 16 bits
        return self.qkv.rows(x) if self.gates is None else InputFormat()

    def mix(
        self, n: int, x: Tensor | QuantisedRows, rotation: Rotation | None, attend: Attend, multiply: Multiply = functional.linear
    ) -> Tensor:
        H, Hk, D = self.config.heads, self.kv_heads, self.config.head_dim
        q, k, v = self.qkv(x, multiply).unflatten(-1, (self.queries + 2 * Hk, D)).split((self.queries, Hk, Hk), dim=1)
        gate = None
        if self.config.attention_gate:
            q, gate = q.unflatten(1, (H, 2)).unbind(2)
        if self.q_norm is not None and self.k_norm is not None:
            if self.config.qk_norm_of_all_heads:
                rows = [(q.flatten(1), self.q_norm), (k.flatten(1), self.k_norm)]
                of_parts = self.placement.ranks > 1
                q, k = normalise_parts(rows, self.placement) if of_parts else (normalise(x, norm) for x, norm in rows)
                q, k = q.unflatten(1, (H, D)), k.unflatten(1, (Hk, D))
            else:
                q, k = normalise(q, self.q_norm), normalise(k, self.k_norm)
        if (bound := self.config.qkv_bound) is not None:
            q, k, v = (x.clamp(-bound, bound) for x in (q, k, v))
        if self.gates is None:
            o = attend(n, q, k, v, rotation)
        else:
            assert isinstance(x, Tensor), "gates ask for no codes"
            o = attend(n, q, k, v, rotation, self.gates(x, multiply).unflatten(-1, (H, BRANCHES)).sigmoid())
        o = o.flatten(1)
        return self._output(o if gate is None else o * gate.sigmoid().flatten(1), multiply)
