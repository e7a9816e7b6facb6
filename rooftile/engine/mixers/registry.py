"""The kinds of layers that an engine has, and the choice of one for each layer of a model."""

from __future__ import annotations

from rooftile.engine.mixers.exact.context_mixer import ContextMixer
from rooftile.engine.mixers.exact.mixer import ExactMixer
from rooftile.engine.mixers.latent.mixer import LatentMixer
from rooftile.engine.mixers.loki.mixer import LokiMixer
from rooftile.engine.mixers.mixer import Mixer
from rooftile.engine.mixers.native_sparse.mixer import NativeSparseMixer
from rooftile.engine.mixers.recurrent.delta import DeltaMixer
from rooftile.engine.mixers.recurrent.linear import LinearMixer, PerformerMixer
from rooftile.engine.mixers.recurrent.mamba import MambaMixer
from rooftile.engine.mixers.recurrent.mamba2 import Mamba2Mixer
from rooftile.engine.settings.config import EngineConfig
from rooftile.errors import Unsupported
from rooftile.kvcache.specs import State
from rooftile.models import ModelConfig

# the mixer of each kind of layer, by the name that the model has for it (`rooftile.models.mixers.MIXERS`)
MIXERS: dict[str, type[Mixer]] = {
    "attention": ExactMixer, "native_sparse": NativeSparseMixer, "mamba": MambaMixer, "mamba2": Mamba2Mixer,
    "delta": DeltaMixer, "latent": LatentMixer, "linear": LinearMixer, "performer": PerformerMixer,
}  # fmt: skip
# the mixers that `approximate=` puts in the place of others
APPROXIMATE: dict[str, type[Mixer]] = {"attention": LokiMixer}
# and those that `context_parallel_size=` puts there
CONTEXT: dict[str, type[Mixer]] = {"attention": ContextMixer}


def kind_of(name: str, *, approximate: bool = False, context_ranks: int = 1) -> type[Mixer]:
    """Returns the mixer of layers that have a name in the model.

    Args:
        name: the name.
        approximate: whether an approximation is asked for.
        context_ranks: among how many ranks the tokens of a sequence are dealt out.

    Raises:
        Unsupported: such layers cannot have tokens on several ranks.
    """
    if context_ranks > 1:
        if name not in CONTEXT:
            raise Unsupported(
                f"context_parallel_size is {context_ranks}, and the model has layers of the kind {name!r}; it deals out keys of "
                "exact attention only: leave it out, or take tensor_parallel_size"
            )
        return CONTEXT[name]
    return APPROXIMATE.get(name, MIXERS[name]) if approximate else MIXERS[name]


def mixers_of(shape: ModelConfig, config: EngineConfig) -> tuple[Mixer, ...]:
    """Returns one mixer for each kind of layer that a model has.

    Raises:
        InvalidInput: a setting does not go with a layer of the model.
        Unsupported: the same, for what is not supported.
    """
    found = []
    # a layer's own mixer refuses first, then the approximation that replaces exact attention
    for name in sorted(dict.fromkeys(shape.mixers), key=lambda name: name in APPROXIMATE):
        layers = tuple(n for n, own in enumerate(shape.mixers) if own == name)
        kind = kind_of(name, approximate=config.approximate is not None, context_ranks=config.context_parallel_size)
        found.append(kind(shape, layers, config))
    if any(mixer.separates_prompts for mixer in found) and any(isinstance(s, State) for mixer in found for s in mixer.specs()):
        raise Unsupported("approximate is given and the model has layers with a state, which read no answer token by token again")
    return tuple(found)
