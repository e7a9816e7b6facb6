"""The class of each kind of layer."""

from __future__ import annotations

from rooftile.models.attention_layer import AttentionLayer
from rooftile.models.config import ModelConfig
from rooftile.models.delta.delta_layer import DeltaLayer
from rooftile.models.layers import Layer
from rooftile.models.mamba.mamba2_layer import Mamba2Layer
from rooftile.models.mamba.mamba_layer import MambaLayer
from rooftile.models.placement import Placement

# kinds without heads of attention, by the names that `rooftile.models.mixers.MIXERS` has for them
_RECURRENT: dict[str, type[Layer]] = {"mamba": MambaLayer, "mamba2": Mamba2Layer, "delta": DeltaLayer}


def layer_of(config: ModelConfig, n: int, placement: Placement, *, waits: bool = False) -> Layer:
    """Returns layer n of a model, with uninitialised weights."""
    return _RECURRENT.get(config.mixers[n], AttentionLayer)(config, n, placement, waits=waits)
