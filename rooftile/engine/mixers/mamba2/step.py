"""Mamba-2 in one step: convolution and recurrence of prompts in chunks, and of single tokens in place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.engine.mixers.mamba2 import standins as rec
from rooftile.engine.mixers.step import StepTokens
from rooftile.models.mamba2_layer import Mamba2Layer
from rooftile.models.mixers import Mamba2Sizes


class Recurrence(NamedTuple):
    """A layer's weights, as its operators take them, and the states of all sequences in it."""

    conv_weight: Tensor  # (W + 2 G N, K)
    conv_bias: Tensor | None
    A: Tensor  # (H,), negative
    D: Tensor  # (H,)
    dt_bias: Tensor  # (H,)
    tails: Tensor  # (rows, W + 2 G N, K - 1): the last inputs of the convolution
    states: Tensor  # (rows, H, P, N)

    @classmethod
    def of(cls, layer: Mamba2Layer, tails: Tensor, states: Tensor) -> Recurrence:
        """Takes the weights of a layer."""
        A = -torch.exp(layer.A_log)
        return cls(layer.conv_weight, layer.conv_bias, A, layer.D, layer.dt_bias, tails, states)


class Mamba2Step:
    """Mixes the tokens of a step; for all layers of the kind.

    Args:
        recurrences: by the layer's number.
        sizes: of the layers.
        step: where the tokens are.
    """

    def __init__(self, recurrences: dict[int, Recurrence], sizes: Mamba2Sizes, step: StepTokens) -> None:
        self.recurrences, self.sizes, self.split = recurrences, sizes, step.split
        self.single = step.slots[step.split :]
        self.cu: Tensor | None = None
        if step.chunks is not None:
            self.cu = step.chunks.cu_q
            # all tokens of a chunk have the same slot
            self.slots = step.slots[self.cu[:-1].long()]

    def __call__(self, layer: int, /, xBC: Tensor, dt: Tensor) -> Tensor:
        """Mixes the tokens of one layer; see `rooftile.models.Attend`."""
        one, split, found = self.recurrences[layer], self.split, []
        if self.cu is not None:
            found.append(self._read_chunks(one, xBC[:split], dt[:split], self.cu))
        if split < len(dt):
            found.append(self._read_singly(one, xBC[split:], dt[split:]))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _read_chunks(self, one: Recurrence, xBC: Tensor, dt: Tensor, cu: Tensor) -> Tensor:
        tails, states = one.tails[self.slots], one.states[self.slots]
        xBC, tails = rec.causal_conv(xBC, one.conv_weight, one.conv_bias, activation="silu", tail=tails, cu=cu)
        y, states = rec.ssd(
            *self._parts(xBC, dt, one), D=one.D, dt_bias=one.dt_bias, softplus=True, dt_limit=self.sizes.step_limit, state=states,
            cu=cu,
        )  # fmt: skip
        one.tails.index_copy_(0, self.slots, tails)
        one.states.index_copy_(0, self.slots, states)
        return y

    def _read_singly(self, one: Recurrence, xBC: Tensor, dt: Tensor) -> Tensor:
        xBC = rec.conv_step(one.tails, xBC, one.conv_weight, one.conv_bias, activation="silu", slots=self.single)
        return rec.ssd_step(
            one.states, *self._parts(xBC, dt, one), D=one.D, dt_bias=one.dt_bias, softplus=True,
            dt_limit=self.sizes.step_limit, slots=self.single,
        )  # fmt: skip

    def _parts(self, xBC: Tensor, dt: Tensor, one: Recurrence) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns x, dt, A, B and C of tokens."""
        sizes = self.sizes
        shared = sizes.groups * sizes.state
        x, B, C = xBC.split((sizes.width, shared, shared), dim=-1)
        B, C = (part.unflatten(-1, (sizes.groups, sizes.state)) for part in (B, C))
        return x.unflatten(-1, (sizes.heads, sizes.head_dim)), dt, one.A, B, C
