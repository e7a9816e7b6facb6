"""Mamba-2 in an engine."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from rooftile import recurrent as rec
from rooftile.engine.mixers.recurrent.mixer import RecurrentMixer
from rooftile.engine.mixers.recurrent.step import Recurrence
from rooftile.models.layers import Layer
from rooftile.models.mamba.mamba2_layer import Mamba2Layer
from rooftile.models.mamba.sizes import Mamba2Sizes


class Mamba2Recurrence(Recurrence):
    """The recurrence of one layer; its states are (rows, H, P, N)."""

    def __init__(self, layer: Mamba2Layer, tails: Tensor, states: Tensor) -> None:
        super().__init__(layer.conv_weight, layer.conv_bias, tails, states)
        self.sizes, self.A = layer.sizes, -torch.exp(layer.A_log)
        self.options: dict[str, Any] = {"D": layer.D, "dt_bias": layer.dt_bias, "dt_limit": self.sizes.step_limit}

    def read(self, x: Tensor, rest: tuple[Tensor, ...], states: Tensor, cu: Tensor) -> tuple[Tensor, Tensor]:
        y, states = rec.ssd(*self._parts(x, *rest), **self.options, state=states, cu=cu)
        return y, states

    def step(self, x: Tensor, rest: tuple[Tensor, ...], slots: Tensor) -> Tensor:
        y: Tensor = rec.ssd_step(self.states, *self._parts(x, *rest), **self.options, slots=slots)
        return y

    def _parts(self, xBC: Tensor, dt: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns x, dt, A, B and C of tokens."""
        sizes = self.sizes
        shared = sizes.groups * sizes.state
        x, B, C = xBC.split((sizes.width, shared, shared), dim=-1)
        B, C = (part.unflatten(-1, (sizes.groups, sizes.state)) for part in (B, C))
        return x.unflatten(-1, (sizes.heads, sizes.head_dim)), dt, self.A, B, C


class Mamba2Mixer(RecurrentMixer):
    """Layers with Mamba-2."""

    name = "mamba2"

    @property
    def sizes(self) -> Mamba2Sizes:
        assert self.shape.mamba2 is not None
        return self.shape.mamba2

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.sizes.heads, self.sizes.head_dim, self.sizes.state

    def recurrence(self, layer: Layer, tails: Tensor, states: Tensor) -> Recurrence:
        return Mamba2Recurrence(cast(Mamba2Layer, layer), tails, states)
