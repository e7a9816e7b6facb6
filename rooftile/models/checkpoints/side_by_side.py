"""The tensors of a checkpoint that are several parts side by side, as queries, keys and values may be: each is cut by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rooftile.models.attention_layer import AttentionLayer
from rooftile.models.checkpoints.experts import expert_names_of
from rooftile.models.checkpoints.names import names_of
from rooftile.models.config import ModelConfig
from rooftile.models.delta.delta_layer import DeltaLayer
from rooftile.models.experts.feed_forward import ExpertFeedForward
from rooftile.models.feed_forward import DenseFeedForward
from rooftile.models.layers import Layer
from rooftile.models.mamba.mamba2_layer import Mamba2Layer
from rooftile.models.mamba.mamba_layer import MambaLayer
from rooftile.models.mixers import BRANCHES
from rooftile.moe.activations import halves


class Joined(NamedTuple):
    """The tensors of a layer whose names begin with `name`, and the sizes of their parts along an axis."""

    name: str
    axis: int
    sizes: tuple[int, ...]


def joined_in(layer: Layer, config: ModelConfig) -> Iterator[Joined]:
    """Yields the tensors of a layer that are several parts side by side; `config` says what the layer holds."""
    names = names_of(config)
    if isinstance(layer, AttentionLayer):
        q, kv = layer.queries * config.head_dim, layer.kv_heads * config.head_dim
        if config.family == "gpt2":
            # weights are (in, out)
            yield Joined("attn.c_attn.", -1, (q, kv, kv))
        elif config.family == "phi3":
            yield Joined(f"{names.attention}.qkv_proj.", 0, (q, kv, kv))
        elif layer.gates is not None:
            branches = (kv // BRANCHES,) * BRANCHES
            yield from (Joined(f"{names.attention}.{name}_proj.", 0, branches) for name in "kv")
    else:
        yield from (Joined(f"{names.recurrence}.{name}.", 0, sizes) for name, sizes in _recurrence(layer).items())
    following = layer.feed_forward
    if isinstance(following, DenseFeedForward) and following.gated and len(names.gate_up) == 1:
        yield Joined(f"{names.feed_forward}.{names.gate_up[0]}.", 0, (config.ffn,) * 2)
    elif isinstance(following, ExpertFeedForward):
        yield from _experts(following, config)


def _recurrence(layer: Layer) -> dict[str, tuple[int, ...]]:
    if isinstance(layer, MambaLayer):
        return {"in_proj": (layer.sizes.width,) * 2}
    if isinstance(layer, Mamba2Layer):
        sizes = layer.sizes
        convolved = (sizes.width, sizes.groups * sizes.state, sizes.groups * sizes.state)
        return {"in_proj": (sizes.width, *convolved, sizes.heads), "conv1d": convolved}
    if isinstance(layer, DeltaLayer):
        each = (layer.sizes.keys, layer.sizes.keys, layer.sizes.width)
        return {"in_proj_qkv": each, "conv1d": each}
    return {}


def _experts(layer: ExpertFeedForward, config: ModelConfig) -> Iterator[Joined]:
    names, sizes = expert_names_of(config), layer.sizes
    first, *rest = names.parts
    two = halves(sizes.activation)
    if len(rest) == 1 and two == 2:
        if names.stacked:
            # no point behind it: gpt-oss's tensors have no further words, and its biases end in another
            yield Joined(f"{names.experts}.{first}", 1, (sizes.hidden,) * two)
        yield Joined(f"{names.shared}.{first}.", 0, (sizes.shared,) * two)
