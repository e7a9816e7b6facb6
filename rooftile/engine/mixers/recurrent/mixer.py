"""`RecurrentMixer`: layers that keep, for each running answer, a state and the last inputs of their convolution."""

from __future__ import annotations

import math
from abc import abstractmethod

from torch import Tensor

from rooftile.engine.mixers.mixer import Largest
from rooftile.engine.mixers.recurrent.state_mixer import StateMixer
from rooftile.engine.mixers.recurrent.step import Recurrence, RecurrentStep
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.steps.rounds import MOST
from rooftile.exact.spec import CallSettings
from rooftile.kvcache.caches import Caches
from rooftile.kvcache.specs import CacheSpec, State
from rooftile.models import Attend, Decoder, DeltaSizes, Mamba2Sizes, MambaSizes
from rooftile.models.layers import Layer
from rooftile.runtime.dtypes import torch_dtype


class RecurrentMixer(StateMixer):
    """Layers with a convolution and a recurrence of one kind."""

    @property
    @abstractmethod
    def sizes(self) -> MambaSizes | Mamba2Sizes | DeltaSizes:
        """The sizes of the layers."""

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """The numbers of a sequence's state in one layer."""

    @abstractmethod
    def recurrence(self, layer: Layer, tails: Tensor, states: Tensor) -> Recurrence:
        """Returns the recurrence of a layer with its states."""

    def specs(self) -> tuple[CacheSpec, ...]:
        return self._state, self._tail

    @property
    def _state(self) -> State:
        return State(self.layers, f"{self.name} states", self.state_shape, torch_dtype(self.config.state_dtype))

    @property
    def _tail(self) -> State:
        return State(self.layers, f"{self.name} tails", (self.sizes.convolved, self.sizes.kernel - 1), self.shape.dtype)

    def working_bytes(self, largest: Largest) -> int:
        """Returns the bytes of what the convolution and the recurrence write, and of the states of the chunks of a step.

        A step has at most as many chunks as answers run, and their states are there twice, before and after, in fp32. Tokens
        before marks are read once more, from copies (see `Rounds`).
        """
        tokens = largest.tokens * (1 + MOST)
        written = tokens * (2 * self.sizes.convolved + self.sizes.width) * largest.computed.itemsize
        kept = math.prod(self.state_shape) * 4 + self._tail.sequence_bytes() // len(self.layers)
        return written + 2 * largest.answers * kept

    def begin(self, decoder: Decoder, caches: Caches, settings: CallSettings) -> None:
        assert caches.states is not None
        tails, states = caches.states.memory[self._tail.name], caches.states.memory[self._state.name]
        self.recurrences = {
            layer: self.recurrence(decoder.layers[layer], tails[place], states[place]) for place, layer in enumerate(self.layers)
        }

    def on(self, step: StepTokens) -> Attend:
        return RecurrentStep(self.recurrences, step, deterministic=self.config.deterministic)
