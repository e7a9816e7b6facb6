"""A recurrence in one step: prompts in chunks, from copies of their states, and single tokens in place.

Under `deterministic` all tokens are single ones: a state that a chunk leaves has other last bits than a state that single tokens
leave, and others again if the chunk begins elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

import torch
from torch import Tensor

from rooftile import recurrent as rec
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.steps.rounds import Round


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
        deterministic: whether each token is read by itself.
    """

    def __init__(self, recurrences: dict[int, Recurrence], step: StepTokens, *, deterministic: bool = False) -> None:
        self.recurrences, self.split = recurrences, step.split
        self.single = step.slots[step.split :]
        self.rounds = step.rounds()
        self.read = self._read_tokens if deterministic else self._read_chunks

    def __call__(self, layer: int, /, x: Tensor, *rest: Tensor) -> Tensor:
        """Mixes the tokens of one layer; see `rooftile.models.Attend`. The convolution reads x."""
        one, split, found = self.recurrences[layer], self.split, []
        if self.rounds is not None:
            found.append(self.rounds.run(partial(self.read, one), x[:split], *(given[:split] for given in rest)))
        if split < len(x):
            found.append(self._step(one, self.single, x[split:], tuple(given[split:] for given in rest)))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _step(self, one: Recurrence, slots: Tensor, x: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        y = rec.conv_step(one.tails, x, one.conv_weight, one.conv_bias, activation="silu", slots=slots)
        return one.step(y, rest, slots)

    def _read_tokens(self, one: Recurrence, part: Round, x: Tensor, *rest: Tensor) -> Tensor:
        # contiguous: kernels are compiled for strides, and all must be the same
        y = self._step(one, part.slots, x.contiguous(), tuple(given.contiguous() for given in rest))
        part.keep(one.tails, one.states)
        return y

    def _read_chunks(self, one: Recurrence, part: Round, x: Tensor, *rest: Tensor) -> Tensor:
        # a chunk is summed in fp32, whatever dtype its state is kept in
        tails, states = one.tails[part.slots], one.states[part.slots].float()
        x, tails = rec.causal_conv(x, one.conv_weight, one.conv_bias, activation="silu", tail=tails, cu=part.cu)
        y, states = one.read(x, rest, states, part.cu)
        one.tails.index_copy_(0, part.targets, tails)
        one.states.index_copy_(0, part.targets, states.to(one.states.dtype))
        part.keep(one.tails, one.states)
        return y
