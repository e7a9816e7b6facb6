"""Mamba-2 in an engine: a layer keeps, for each running answer, a state and the last inputs of its convolution."""

from __future__ import annotations

from typing import cast

from rooftile.engine.mixers.mamba2.step import Mamba2Step, Recurrence
from rooftile.engine.mixers.mixer import Largest, Mixer
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.settings.config import EngineConfig
from rooftile.errors import Unsupported
from rooftile.exact.spec import CallSettings
from rooftile.kvcache.caches import Caches
from rooftile.kvcache.specs import CacheSpec, State
from rooftile.models import Attend, Decoder, ModelConfig
from rooftile.models.mamba2_layer import Mamba2Layer

# names in `States.memory`
TAILS, STATES = "mamba2.tails", "mamba2.states"


class Mamba2Mixer(Mixer):
    """Layers with Mamba-2."""

    def __init__(self, shape: ModelConfig, layers: tuple[int, ...], config: EngineConfig) -> None:
        super().__init__(shape, layers, config)
        assert shape.mamba2 is not None
        self.sizes = shape.mamba2
        if config.deterministic:
            raise Unsupported(
                "deterministic is True and the model has mamba2 layers; the last bits of their states depend on where steps cut "
                "a prompt: leave deterministic out"
            )
        if config.approximate is not None:
            raise Unsupported("approximate is given and the model has mamba2 layers; Loki has attention in all layers")

    def specs(self) -> tuple[CacheSpec, ...]:
        sizes = self.sizes
        return (
            State(self.layers, STATES, (sizes.heads, sizes.head_dim, sizes.state)),
            State(self.layers, TAILS, (sizes.convolved, sizes.kernel - 1), self.shape.dtype),
        )

    def working_bytes(self, largest: Largest) -> int:
        """Returns the bytes of what the convolution and the recurrence write, and of the states of the chunks of a step.

        A step has at most as many chunks as answers run, and their states are there twice, before and after.
        """
        sizes = self.sizes
        written = largest.tokens * (sizes.convolved + sizes.width) * largest.computed.itemsize
        return written + 2 * largest.answers * sum(spec.sequence_bytes() for spec in self.specs()) // len(self.layers)

    def begin(self, decoder: Decoder, caches: Caches, settings: CallSettings) -> None:
        assert caches.states is not None
        tails, states = caches.states.memory[TAILS], caches.states.memory[STATES]
        self.recurrences = {
            layer: Recurrence.of(cast(Mamba2Layer, decoder.layers[layer]), tails[place], states[place])
            for place, layer in enumerate(self.layers)
        }

    def on(self, step: StepTokens) -> Attend:
        return Mamba2Step(self.recurrences, self.sizes, step)
