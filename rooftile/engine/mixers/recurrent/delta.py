"""The gated delta net in an engine."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from rooftile import recurrent as rec
from rooftile.engine.mixers.recurrent.mixer import RecurrentMixer
from rooftile.engine.mixers.recurrent.step import Recurrence
from rooftile.models.delta.delta_layer import DeltaLayer
from rooftile.models.delta.sizes import DeltaSizes
from rooftile.models.layers import Layer


class DeltaRecurrence(Recurrence):
    """The recurrence of one layer; its states are (rows, Hv, Dk, Dv)."""

    def __init__(self, layer: DeltaLayer, tails: Tensor, states: Tensor) -> None:
        super().__init__(layer.conv_weight, layer.conv_bias, tails, states)
        self.sizes, self.A, self.dt_bias = layer.sizes, -torch.exp(layer.A_log), layer.dt_bias

    def read(self, x: Tensor, rest: tuple[Tensor, ...], states: Tensor, cu: Tensor) -> tuple[Tensor, Tensor]:
        y, states = rec.gated_delta(*self._parts(x, *rest), state=states, cu=cu)
        return y, states

    def step(self, x: Tensor, rest: tuple[Tensor, ...], slots: Tensor) -> Tensor:
        y: Tensor = rec.gated_delta_step(self.states, *self._parts(x, *rest), slots=slots)
        return y

    def _parts(self, qkv: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns queries, keys, values, decays and beta of tokens."""
        sizes = self.sizes
        q, k, v = qkv.split((sizes.keys, sizes.keys, sizes.width), dim=-1)
        q, k = (part.unflatten(-1, (sizes.key_heads, sizes.key_dim)) for part in (q, k))
        beta = b.sigmoid()
        decays = self.A * functional.softplus(a.float() + self.dt_bias)
        return q, k, v.unflatten(-1, (sizes.value_heads, sizes.value_dim)), decays, 2 * beta if sizes.double_beta else beta


class DeltaMixer(RecurrentMixer):
    """Layers with a gated delta net."""

    name = "delta"

    @property
    def sizes(self) -> DeltaSizes:
        assert self.shape.delta is not None
        return self.shape.delta

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.sizes.value_heads, self.sizes.key_dim, self.sizes.value_dim

    def recurrence(self, layer: Layer, tails: Tensor, states: Tensor) -> Recurrence:
        return DeltaRecurrence(cast(DeltaLayer, layer), tails, states)
