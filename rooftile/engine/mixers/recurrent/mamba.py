"""Mamba-1 in an engine."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from rooftile import recurrent as rec
from rooftile.engine.mixers.recurrent.mixer import RecurrentMixer
from rooftile.engine.mixers.recurrent.step import Recurrence
from rooftile.fused import linear
from rooftile.models.layers import Layer
from rooftile.models.mamba.mamba_layer import MambaLayer
from rooftile.models.mamba.sizes import MambaSizes
from rooftile.models.projection import Multiply


class MambaRecurrence(Recurrence):
    """The recurrence of one layer; its states are (rows, W, N)."""

    def __init__(self, layer: MambaLayer, tails: Tensor, states: Tensor, multiply: Multiply) -> None:
        super().__init__(layer.conv_weight, layer.conv_bias, tails, states)
        self.selection, self.A = partial(layer.selection, multiply=multiply), -torch.exp(layer.A_log)
        self.options: dict[str, Any] = {"D": layer.D, "dt_bias": layer.dt_bias}

    def read(self, x: Tensor, rest: tuple[Tensor, ...], states: Tensor, cu: Tensor) -> tuple[Tensor, Tensor]:
        dt, B, C = self.selection(x)
        y, states = rec.selective_scan(x, dt, self.A, B, C, **self.options, state=states, cu=cu)
        return y, states

    def step(self, x: Tensor, rest: tuple[Tensor, ...], slots: Tensor) -> Tensor:
        dt, B, C = self.selection(x)
        y: Tensor = rec.selective_scan_step(self.states, x, dt, self.A, B, C, **self.options, slots=slots)
        return y


class MambaMixer(RecurrentMixer):
    """Layers with Mamba-1."""

    name = "mamba"

    @property
    def sizes(self) -> MambaSizes:
        assert self.shape.mamba is not None
        return self.shape.mamba

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.sizes.width, self.sizes.state

    def recurrence(self, layer: Layer, tails: Tensor, states: Tensor) -> Recurrence:
        multiply = linear if self.config.deterministic else functional.linear
        return MambaRecurrence(cast(MambaLayer, layer), tails, states, multiply)
