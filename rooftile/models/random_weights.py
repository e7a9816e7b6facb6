"""Random weights for a decoder, for benchmarks and tests without a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from rooftile.models.checkpoints.places import tensors_of_layer
from rooftile.models.checkpoints.shares import shares_of_layer
from rooftile.models.checkpoints.stored import slices_of
from rooftile.models.config import ModelConfig
from rooftile.models.layer_kinds import layer_of
from rooftile.models.layers import Layer
from rooftile.models.placement import Placement
from rooftile.models.projection import Norm


class Filled(Protocol):
    """A decoder, as far as it is filled here."""

    embedding: nn.Parameter
    head: nn.Parameter
    positions: nn.Parameter | None
    layers: Sequence[Layer]
    norm: Norm


def fill(decoder: Filled, config: ModelConfig, placement: Placement, generator: torch.Generator) -> None:
    """Draws all weights. A rank draws the numbers that one rank alone would, a layer at a time, and keeps its part of them.

    Args:
        decoder: the part of the model that a rank holds.
        config: the whole model.
        placement: which rank it is.
        generator: on the device of the decoder.
    """
    alone = placement._replace(rank=0, ranks=1, add=None, gather=None)
    for table in (decoder.embedding, decoder.positions):
        if table is not None:
            _draw(table, generator)
    if not config.tie:
        whole = decoder.head if placement.ranks == 1 else alone.parameter(config.vocab_size, config.hidden)
        _draw(whole, generator)
        if placement.ranks > 1:
            decoder.head.copy_(whole[placement.columns(config.vocab_size)])
    for n, layer in enumerate(decoder.layers):
        if placement.ranks == 1:
            _fill_layer(layer, config, generator)
        else:
            source = layer_of(config, n, alone)
            _fill_layer(source, config, generator)
            _keep_part(source, layer, config, placement)
    _fill_norm(decoder.norm, config)


def _draw(weight: Tensor, generator: torch.Generator) -> None:
    weight.normal_(0.0, 0.02, generator=generator)


def _fill_layer(layer: Layer, config: ModelConfig, generator: torch.Generator) -> None:
    for part in layer.modules():
        if isinstance(part, Norm):
            _fill_norm(part, config)
            continue
        for weight in part.parameters(recurse=False):
            _draw(weight, generator)
    layer.draw(generator)


def _fill_norm(norm: Norm, config: ModelConfig) -> None:
    norm.weight.fill_(0.0 if config.norm_plus_one else 1.0)
    if norm.bias is not None:
        norm.bias.fill_(0.0)


def _keep_part(whole: Layer, part: Layer, config: ModelConfig, placement: Placement) -> None:
    """Copies a rank's part of a layer."""
    places, shares = dict(tensors_of_layer(part, part.config)), dict(shares_of_layer(config, whole, part, placement))
    for name, x in tensors_of_layer(whole, config):
        if name in places:
            places[name].copy_(slices_of(x, shares[name].cut) if name in shares else x)
