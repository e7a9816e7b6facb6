"""`StateMixer`: layers whose whole memory of earlier tokens is a state of a fixed size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from rooftile.engine.mixers.mixer import Mixer
from rooftile.engine.mixers.recurrent.trials import RecurrentLayer
from rooftile.engine.mixers.trial import TrialSetup
from rooftile.engine.settings.config import EngineConfig
from rooftile.errors import Unsupported
from rooftile.models import Decoder, ModelConfig


class StateMixer(Mixer):
    """Layers of one kind with a state."""

    name: ClassVar[str]
    """The name of the kind in `ModelConfig.mixers`."""

    def __init__(self, shape: ModelConfig, layers: tuple[int, ...], config: EngineConfig) -> None:
        super().__init__(shape, layers, config)
        if config.approximate is not None:
            raise Unsupported(f"approximate is given and the model has {self.name} layers; Loki has attention in all layers")

    @classmethod
    def trials(cls, trial: TrialSetup) -> Sequence[Callable[[], None]]:
        shape = replace(trial.small(cls.name), dtype=trial.dtype)
        config = EngineConfig(block_size=trial.size, deterministic=trial.deterministic)
        decoder = Decoder(shape, dtype=trial.dtype, device=trial.device)
        return RecurrentLayer(trial, cls(shape, (0,), config), decoder).jobs(trial.longest)
