"""Multi-head latent attention in an engine.

A token's latent and the key that rotates lie in a plane beside the blocks: forks, prefixes and preemption need nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, cast

from rooftile.engine.mixers.latent.step import MOST_BYTES, LatentAttention, LatentStep
from rooftile.engine.mixers.latent.trials import LatentTrial
from rooftile.engine.mixers.mixer import Largest, Mixer
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.mixers.trial import SHORT, USUAL, TrialSetup
from rooftile.engine.settings.config import EngineConfig
from rooftile.errors import Unsupported
from rooftile.exact.spec import CallSettings
from rooftile.kvcache.caches import Caches
from rooftile.kvcache.specs import CacheSpec, Plane
from rooftile.models import Attend, Decoder, LatentSizes, ModelConfig
from rooftile.models.latent.latent_layer import LatentLayer

# the plane with the latents of all layers
LATENTS = "latents"


class LatentMixer(Mixer):
    """Layers with multi-head latent attention."""

    takes_drafts: ClassVar[bool] = True
    kernels: ClassVar[tuple[str, ...]] = (
        "engine.mixers.latent.kernels", "exact.backends.triton.flash_fwd", "kvcache.page_kernels",
    )  # fmt: skip

    def __init__(self, shape: ModelConfig, layers: tuple[int, ...], config: EngineConfig) -> None:
        super().__init__(shape, layers, config)
        what = "the model has latent layers"
        if config.deterministic:
            raise Unsupported(f"deterministic is True and {what}; their bits depend on what a step reads together")
        if config.kv_dtype == "fp8":
            raise Unsupported(f'kv_dtype is "fp8" and {what}; these have caches in the dtype of the model')
        if config.approximate is not None:
            raise Unsupported(f"approximate is given and {what}; Loki has attention with keys of its own in all layers")

    @property
    def sizes(self) -> LatentSizes:
        """The sizes of the layers."""
        assert self.shape.latent is not None
        return self.shape.latent

    def specs(self) -> tuple[CacheSpec, ...]:
        return (Plane(self.layers, LATENTS, (len(self.layers), self.config.block_size, self.sizes.kept)),)

    def working_bytes(self, largest: Largest) -> int:
        """Returns the bytes of gathered latents, of what they are expanded to, and of scores.

        What is read together is bounded, but by no less than a sequence, in all heads in decoding and in one of a prompt's.
        """
        sizes, longest = self.sizes, largest.length
        prompt = longest * (sizes.kept + 2 * sizes.head_dim + 2 * sizes.value_dim) * largest.computed.itemsize
        answer = longest * (2 * sizes.kept + 3 * self.shape.heads) * 4
        return 2 * MOST_BYTES + max(prompt, answer)

    def begin(self, decoder: Decoder, caches: Caches, settings: CallSettings) -> None:
        plane = caches.pages.planes[LATENTS]
        self.attention = {
            layer: LatentAttention(cast(LatentLayer, decoder.layers[layer]), plane[:, place, :, None], decoder.config.scale)
            for place, layer in enumerate(self.layers)
        }

    def on(self, step: StepTokens) -> Attend:
        return LatentStep(self.attention, step)

    @classmethod
    def trials(cls, trial: TrialSetup) -> Sequence[Callable[[], None]]:
        shape = trial.small("latent")
        mixer = cls(shape, (0,), EngineConfig(block_size=trial.size))
        return LatentTrial(trial, mixer, Decoder(shape, dtype=trial.dtype, device=trial.device)).jobs(
            dict.fromkeys((trial.longest, USUAL, SHORT))
        )
