"""The class of each kind of layer."""

from __future__ import annotations

from rooftile.models.attention_layer import AttentionLayer
from rooftile.models.config import ModelConfig
from rooftile.models.delta.delta_layer import DeltaLayer
from rooftile.models.latent.latent_layer import LatentLayer
from rooftile.models.layers import Layer
from rooftile.models.linear.performer_layer import PerformerLayer
from rooftile.models.mamba.mamba2_layer import Mamba2Layer
from rooftile.models.mamba.mamba_layer import MambaLayer
from rooftile.models.placement import Placement

# kinds that have more than heads of attention, or none, by the names that `rooftile.models.mixers.MIXERS` has for them
_KINDS: dict[str, type[Layer]] = {
    "performer": PerformerLayer, "mamba": MambaLayer, "mamba2": Mamba2Layer, "delta": DeltaLayer,
    "latent": LatentLayer,
}  # fmt: skip


def layer_of(config: ModelConfig, n: int, placement: Placement, *, waits: bool = False) -> Layer:
    """Returns layer n of a model, with uninitialised weights."""
    return _KINDS.get(config.mixers[n], AttentionLayer)(config, n, placement, waits=waits)
