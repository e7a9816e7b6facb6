"""`Layers`: the layers of a model in an engine, each with the mixer of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rooftile.engine.mixers.mixer import Mixer
from rooftile.engine.mixers.step import StepTokens
from rooftile.exact.spec import CallSettings
from rooftile.kvcache.caches import Caches
from rooftile.models import Attend, Decoder


class Layers:
    """Mixes the tokens of all layers in a step.

    Args:
        mixers: one for each kind of layer.
        decoder: the model.
        caches: what its layers keep.
        settings: scale, softcap and the like.
    """

    def __init__(self, mixers: Sequence[Mixer], decoder: Decoder, caches: Caches, settings: CallSettings) -> None:
        self.mixers = tuple(mixers)
        for mixer in mixers:
            mixer.begin(decoder, caches, settings)
        kinds = {layer: kind for kind, mixer in enumerate(mixers) for layer in mixer.layers}
        self._kinds = [kinds[layer] for layer in range(decoder.config.layers)]
        self.captures = all(mixer.captures for mixer in mixers)
        """Whether steps that only decode can be captured in graphs."""
        self.separates_prompts = any(mixer.separates_prompts for mixer in mixers)
        """Whether some layer computes a prompt's tokens otherwise than an answer's, whatever a step reads together."""

    def on(self, step: StepTokens) -> Attend:
        """Returns what mixes tokens in one step."""
        if len(self.mixers) == 1:
            return self.mixers[0].on(step)
        each = [mixer.on(step) for mixer in self.mixers]

        def attend(layer: int, /, *given: Any) -> Tensor:
            return each[self._kinds[layer]](layer, *given)

        return attend


def unmixed(decoder: Decoder) -> Attend:
    """Returns what gives layers tensors of the right shape in place of mixed tokens, for runs of all that layers do besides."""

    def attend(layer: int, /, first: Tensor, *rest: Any) -> Tensor:
        return first.new_empty(first.shape[0], decoder.layers[layer].o.inputs)

    return attend
