"""The names of a decoder's parameters in a checkpoint, and the views of parameters that tensors fill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from rooftile.models.attention_layer import AttentionLayer
from rooftile.models.checkpoints.experts import expert_tensors_of
from rooftile.models.checkpoints.names import Names, names_of
from rooftile.models.config import ModelConfig
from rooftile.models.delta import files as delta
from rooftile.models.delta.delta_layer import DeltaLayer
from rooftile.models.experts.feed_forward import ExpertFeedForward
from rooftile.models.feed_forward import DenseFeedForward
from rooftile.models.latent import files as latent
from rooftile.models.latent.latent_layer import LatentLayer
from rooftile.models.layers import Layer
from rooftile.models.linear.performer_layer import PerformerLayer
from rooftile.models.mamba.mamba2_layer import Mamba2Layer
from rooftile.models.mamba.mamba_layer import MambaLayer
from rooftile.models.mixers import BRANCHES
from rooftile.models.projection import Norm, Projection


def tensors_of(
    config: ModelConfig, embedding: Tensor, positions: Tensor | None, layers: Iterable[Layer], norm: Norm, head: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """See `Decoder.tensors`."""
    names = names_of(config)
    yield f"{names.embedding}.weight", embedding
    if positions is not None:
        yield "wpe.weight", positions
    for n, layer in enumerate(layers):
        yield from ((f"{names.layers}.{n}.{name}", place) for name, place in tensors_of_layer(layer, config))
    yield from _norm(names.norm, norm)
    if not config.tie:
        yield "lm_head.weight", head


def tensors_of_layer(layer: Layer, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a layer by their names within it, and the views of parameters that they fill."""
    return _gpt2_layer(layer) if config.family == "gpt2" else _layer(layer, config)


def projections_of(layer: Layer, config: ModelConfig) -> Iterator[tuple[Projection, dict[str, int]]]:
    """Yields a layer's large projections, each with the modules of the checkpoint that are its parts, and their rows."""
    if config.family == "gpt2":
        for name, projection in _gpt2_projections(layer).items():
            yield projection, {name: projection.outputs}
        return
    names = names_of(config)
    if isinstance(layer, AttentionLayer):
        q, kv = layer.queries * config.head_dim, layer.kv_heads * config.head_dim
        parts = {"qkv_proj": layer.qkv.outputs} if config.family == "phi3" else {"q_proj": q, "k_proj": kv, "v_proj": kv}
        yield layer.qkv, {f"{names.attention}.{name}": rows for name, rows in parts.items()}
    elif isinstance(layer, LatentLayer):
        for projection, parts in latent.projections_of(layer):
            yield projection, {f"{names.attention}.{name}": rows for name, rows in parts.items()}
    else:
        parts = delta.rows_of(layer, config.family) if isinstance(layer, DeltaLayer) else {"in_proj": layer.reader.outputs}
        yield layer.reader, {f"{names.recurrence}.{name}": rows for name, rows in parts.items()}
    dense = layer.feed_forward if isinstance(layer.feed_forward, DenseFeedForward) else None
    if dense is not None:
        parts = dict.fromkeys(names.gate_up, dense.up.outputs // len(names.gate_up))
        yield dense.up, {f"{names.feed_forward}.{name}": rows for name, rows in parts.items()}
    yield layer.o, {_output(layer, config, names): config.hidden}
    if dense is not None:
        yield dense.down, {f"{names.feed_forward}.{names.down}": config.hidden}


def _layer(layer: Layer, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    names = names_of(config)
    if isinstance(layer, AttentionLayer):
        yield from _attention(layer, names, config)
    elif isinstance(layer, LatentLayer):
        for name, norm in latent.norms_of(layer):
            yield from _norm(f"{names.attention}.{name}", norm)
    elif isinstance(layer, DeltaLayer):
        yield from ((f"{names.recurrence}.{name}", place) for name, place in delta.tensors_of(layer, config.family))
    elif isinstance(layer, MambaLayer | Mamba2Layer):
        yield from ((f"{names.recurrence}.{name}", place) for name, place in _recurrence(layer))
    if isinstance(layer.feed_forward, ExpertFeedForward):
        yield from expert_tensors_of(layer.feed_forward, config)
    for projection, parts in projections_of(layer, config):
        yield from _split(projection, parts)
    yield from _norm(names.mixer_norm, layer.mixer_norm)
    yield from _norm(names.ffn_norm, layer.ffn_norm)
    yield from _norm("post_attention_layernorm", layer.mixer_post_norm)
    yield from _norm("post_feedforward_layernorm", layer.ffn_post_norm)


def _output(layer: Layer, config: ModelConfig, names: Names) -> str:
    """Returns the name of the projection that reads what was mixed."""
    if isinstance(layer, AttentionLayer | LatentLayer):
        return f"{names.attention}.o_proj"
    return f"{names.recurrence}.{delta.output_of(config.family) if isinstance(layer, DeltaLayer) else 'out_proj'}"


def _attention(layer: AttentionLayer, names: Names, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields what a layer of attention has beside its large projections."""
    folder = names.attention
    if layer.gates is not None and layer.compression is not None:
        yield from _split(layer.gates, {f"{folder}.g_proj": BRANCHES * config.heads})
        yield from ((f"{folder}.compression.{name}", place) for name, place in layer.compression.tensors())
    if layer.sinks is not None:
        yield f"{folder}.sinks", layer.sinks
    if isinstance(layer, PerformerLayer):
        yield f"{folder}.projection", layer.projection
    yield from _norm(f"{folder}.q_norm", layer.q_norm)
    yield from _norm(f"{folder}.k_norm", layer.k_norm)


def _recurrence(layer: MambaLayer | Mamba2Layer) -> Iterator[tuple[str, Tensor]]:
    """Yields what a layer of Mamba has beside its large projections."""
    # a checkpoint has the weights of a convolution with one input channel for each output
    yield "conv1d.weight", layer.conv_weight[:, None]
    if layer.conv_bias is not None:
        yield "conv1d.bias", layer.conv_bias
    yield from (("A_log", layer.A_log), ("D", layer.D))
    if isinstance(layer, MambaLayer):
        yield from (("x_proj.weight", layer.select), ("dt_proj.weight", layer.widen), ("dt_proj.bias", layer.dt_bias))
        if layer.sizes.selection_norms == "weighted":
            for name, norm in zip(("dt", "b", "c"), layer.selection_norms, strict=True):
                yield f"{name}_layernorm.weight", norm.weight
    else:
        yield from (("dt_bias", layer.dt_bias), ("norm.weight", layer.gated_norm.weight))


def _gpt2_layer(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    for name, projection in _gpt2_projections(layer).items():
        # GPT-2 keeps its weights as (in, out)
        if projection.weight is not None:
            yield f"{name}.weight", projection.weight.T
        if projection.bias is not None:
            yield f"{name}.bias", projection.bias
    yield from _norm("ln_1", layer.mixer_norm)
    yield from _norm("ln_2", layer.ffn_norm)


def _gpt2_projections(layer: Layer) -> dict[str, Projection]:
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return dict(zip(names, layer.projections, strict=True))


def _split(projection: Projection, sizes: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yields the parts of a projection; weights that are quantised are no places to fill."""
    rows = list(sizes.values())
    if projection.weight is not None:
        for name, weight in zip(sizes, projection.weight.split(rows), strict=True):
            yield f"{name}.weight", weight
    if projection.bias is not None:
        for name, bias in zip(sizes, projection.bias.split(rows), strict=True):
            yield f"{name}.bias", bias


def _norm(name: str, norm: Norm | None) -> Iterator[tuple[str, Tensor]]:
    if norm is not None:
        yield f"{name}.weight", norm.weight
        if norm.bias is not None:
            yield f"{name}.bias", norm.bias
