"""A recurrence in one step: prompts in chunks, from copies of their states, and single tokens in place."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from rooftile import recurrent as rec
from rooftile.engine.mixers.step import StepTokens


class Recurrence(ABC):
    """A layer's weights, as its operators take them, and the states of all sequences in it.

    Args:
        conv_weight, conv_bias: (W, K) and (W,) or None.
        tails: (rows, W, K - 1): the last inputs of the convolution.
        states: (rows, ...).
    """

    def __init__(self, conv_weight: Tensor, conv_bias: Tensor | None, tails: Tensor, states: Tensor) -> None:
        self.conv_weight, self.conv_bias, self.tails, self.states = conv_weight, conv_bias, tails, states

    @abstractmethod
    def read(self, x: Tensor, rest: tuple[Tensor, ...], states: Tensor, cu: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs of sequences back to back, and their states after them.

        Args:
            x: what the convolution gave, (total, W).
            rest: what else the layer gives.
            states: the states before, one for each sequence.
            cu: the offsets of the sequences.
        """

    @abstractmethod
    def step(self, x: Tensor, rest: tuple[Tensor, ...], slots: Tensor) -> Tensor:
        """Returns the outputs of single tokens, and changes their states, which lie in the rows `slots`, in place."""


class RecurrentStep:
    """Mixes the tokens of a step; for all layers of a kind.

    Args:
        recurrences: by the layer's number.
        step: where the tokens are.
    """

    def __init__(self, recurrences: dict[int, Recurrence], step: StepTokens) -> None:
        self.recurrences, self.split = recurrences, step.split
        self.single = step.slots[step.split :]
        self.cu: Tensor | None = None
        if step.chunks is not None:
            self.cu = step.chunks.cu_q
            # all tokens of a chunk have the same slot
            self.slots = step.slots[self.cu[:-1].long()]

    def __call__(self, layer: int, /, x: Tensor, *rest: Tensor) -> Tensor:
        """Mixes the tokens of one layer; see `rooftile.models.Attend`. The convolution reads x."""
        one, split, found = self.recurrences[layer], self.split, []
        if self.cu is not None:
            found.append(self._read_chunks(one, x[:split], tuple(given[:split] for given in rest), self.cu))
        if split < len(x):
            y = rec.conv_step(one.tails, x[split:], one.conv_weight, one.conv_bias, activation="silu", slots=self.single)
            found.append(one.step(y, tuple(given[split:] for given in rest), self.single))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _read_chunks(self, one: Recurrence, x: Tensor, rest: tuple[Tensor, ...], cu: Tensor) -> Tensor:
        # a chunk is summed in fp32, whatever dtype its state is kept in
        tails, states = one.tails[self.slots], one.states[self.slots].float()
        x, tails = rec.causal_conv(x, one.conv_weight, one.conv_bias, activation="silu", tail=tails, cu=cu)
        y, states = one.read(x, rest, states, cu)
        one.tails.index_copy_(0, self.slots, tails)
        one.states.index_copy_(0, self.slots, states.to(one.states.dtype))
        return y
