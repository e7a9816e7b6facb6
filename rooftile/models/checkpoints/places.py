"""The names of a decoder's parameters in a checkpoint, and the views of parameters that tensors fill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from rooftile.models.config import ModelConfig
from rooftile.models.layers import Layer, Norm, Projection
from rooftile.models.mixers import BRANCHES


def tensors_of(
    config: ModelConfig, embedding: Tensor, positions: Tensor | None, layers: Iterable[Layer], norm: Norm, head: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """See `Decoder.tensors`."""
    gpt2 = config.family == "gpt2"
    yield "wte.weight" if gpt2 else "embed_tokens.weight", embedding
    if positions is not None:
        yield "wpe.weight", positions
    for n, layer in enumerate(layers):
        places = _gpt2_layer(layer) if gpt2 else _layer(layer, config)
        yield from ((f"h.{n}.{name}" if gpt2 else f"layers.{n}.{name}", place) for name, place in places)
    yield from _norm("ln_f" if gpt2 else "norm", norm)
    if not config.tie:
        yield "lm_head.weight", head


def projections_of(layer: Layer, config: ModelConfig) -> Iterator[tuple[Projection, dict[str, int]]]:
    """Yields a layer's large projections, each with the modules of the checkpoint that are its parts, and their rows."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    if layer.gates is not None:
        kv *= BRANCHES
    if config.family == "gpt2":
        for name, projection in _gpt2_projections(layer).items():
            yield projection, {name: projection.outputs}
        return
    if config.family == "phi3":
        yield layer.qkv, {"self_attn.qkv_proj": layer.qkv.outputs}
        yield layer.up, {"mlp.gate_up_proj": layer.up.outputs}
    else:
        yield layer.qkv, {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        yield layer.up, {"mlp.gate_proj": config.ffn, "mlp.up_proj": config.ffn}
    yield layer.o, {"self_attn.o_proj": config.hidden}
    yield layer.down, {"mlp.down_proj": config.hidden}


def _layer(layer: Layer, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    if layer.gates is not None and layer.compression is not None:
        yield from _split(layer.gates, {"self_attn.g_proj": BRANCHES * config.heads})
        yield from ((f"self_attn.compression.{name}", place) for name, place in layer.compression.tensors())
    for projection, parts in projections_of(layer, config):
        yield from _split(projection, parts)
    # in layers with four norms the second has another name
    second = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    yield from _norm("input_layernorm", layer.attention_norm)
    yield from _norm(second, layer.ffn_norm)
    yield from _norm("post_attention_layernorm", layer.attention_post_norm)
    yield from _norm("post_feedforward_layernorm", layer.ffn_post_norm)
    yield from _norm("self_attn.q_norm", layer.q_norm)
    yield from _norm("self_attn.k_norm", layer.k_norm)


def _gpt2_layer(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    for name, projection in _gpt2_projections(layer).items():
        # GPT-2 keeps its weights as (in, out)
        if projection.weight is not None:
            yield f"{name}.weight", projection.weight.T
        if projection.bias is not None:
            yield f"{name}.bias", projection.bias
    yield from _norm("ln_1", layer.attention_norm)
    yield from _norm("ln_2", layer.ffn_norm)


def _gpt2_projections(layer: Layer) -> dict[str, Projection]:
    return {"attn.c_attn": layer.qkv, "attn.c_proj": layer.o, "mlp.c_fc": layer.up, "mlp.c_proj": layer.down}


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
