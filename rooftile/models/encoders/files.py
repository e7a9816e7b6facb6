"""The names of an encoder's tensors in a checkpoint, without prefix, and the parameters that they fill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from rooftile.models.projection import Norm, Projection

# its class is made of what is here
Encoder = Any


def tensors_of(encoder: Encoder) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor's name, and the view of a parameter that it fills."""
    yield from _modernbert(encoder) if encoder.config.family == "modernbert" else _bert(encoder)


def _bert(encoder: Encoder) -> Iterator[tuple[str, Tensor]]:
    yield "embeddings.word_embeddings.weight", encoder.embedding
    if encoder.positions is not None:
        yield "embeddings.position_embeddings.weight", encoder.positions
    if encoder.token_types is not None:
        yield "embeddings.token_type_embeddings.weight", encoder.token_types
    yield from _norm("embeddings.LayerNorm", encoder.embedding_norm)
    for n, layer in enumerate(encoder.layers):
        place, (qkv, o, up, down) = f"encoder.layer.{n}", layer.projections
        for name, rows in zip(("query", "key", "value"), range(3), strict=True):
            yield from _rows(f"{place}.attention.self.{name}", qkv, rows)
        yield from _whole(f"{place}.attention.output.dense", o)
        yield from _norm(f"{place}.attention.output.LayerNorm", layer.mixer_post_norm)
        yield from _whole(f"{place}.intermediate.dense", up)
        yield from _whole(f"{place}.output.dense", down)
        yield from _norm(f"{place}.output.LayerNorm", layer.ffn_post_norm)
    if encoder.head is not None:
        of_bert = encoder.config.family == "bert"
        yield from _whole("pooler.dense" if of_bert else "classifier.dense", encoder.head.dense)
        yield from _whole("classifier" if of_bert else "classifier.out_proj", encoder.head.out)


def _modernbert(encoder: Encoder) -> Iterator[tuple[str, Tensor]]:
    bias = encoder.sizes.norm_bias
    yield "embeddings.tok_embeddings.weight", encoder.embedding
    yield from _norm("embeddings.norm", encoder.embedding_norm, bias)
    for n, layer in enumerate(encoder.layers):
        place, (qkv, o, up, down) = f"layers.{n}", layer.projections
        yield from _norm(f"{place}.attn_norm", layer.mixer_norm, bias)
        yield from _whole(f"{place}.attn.Wqkv", qkv)
        yield from _whole(f"{place}.attn.Wo", o)
        yield from _norm(f"{place}.mlp_norm", layer.ffn_norm, bias)
        yield from _whole(f"{place}.mlp.Wi", up)
        yield from _whole(f"{place}.mlp.Wo", down)
    yield from _norm("final_norm", encoder.norm, bias)
    if encoder.head is not None:
        yield from _whole("head.dense", encoder.head.dense)
        yield from _norm("head.norm", encoder.head.norm, bias)
        yield from _whole("classifier", encoder.head.out)


def _whole(name: str, projection: Projection) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"{name}.{part}", place) for part, place in projection.named_parameters())


def _rows(name: str, projection: Projection, third: int) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"{name}.{part}", place.chunk(3)[third]) for part, place in projection.named_parameters())


def _norm(name: str, norm: Norm | None, bias: bool = True) -> Iterator[tuple[str, Tensor]]:
    if norm is not None:
        yield f"{name}.weight", norm.weight
        if bias and norm.bias is not None:
            yield f"{name}.bias", norm.bias
