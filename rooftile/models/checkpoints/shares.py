"""Says for each stored tensor which part of it a rank holds (tensor parallelism).

The whole model and the part of it are made of the same modules, without memory, and have the same names of tensors. Along an axis
on which a place in the part is n times shorter than in the whole, the rank holds one of n equal slices; of tensors with several
parts side by side it holds a slice of each. So no family says by itself how it is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rooftile.models.checkpoints.names import names_of
from rooftile.models.checkpoints.places import tensors_of_layer
from rooftile.models.checkpoints.side_by_side import Joined, joined_in
from rooftile.models.checkpoints.stored import Cut, Share
from rooftile.models.config import ModelConfig
from rooftile.models.layer_kinds import layer_of
from rooftile.models.layers import Layer
from rooftile.models.placement import Placement


def shares_of(config: ModelConfig, placement: Placement) -> dict[str, Share]:
    """Returns the shares of all tensors of which a rank holds a part, by their names without prefix.

    Args:
        config: the whole model.
        placement: which rank it is.
    """
    found: dict[str, Share] = {}
    folder = names_of(config).layers
    part = placement._replace(device=torch.device("meta"))
    for n in range(config.layers):
        whole, mine = layer_of(config, n, Placement(*part[:2])), layer_of(config, n, part)
        found |= {f"{folder}.{n}.{name}": share for name, share in shares_of_layer(config, whole, mine, placement)}
    head = (placement.columns(config.vocab_size),), (slice(0, config.hidden),)
    return found if config.tie else found | {"lm_head.weight": Share(head, (config.vocab_size, config.hidden))}


def shares_of_layer(config: ModelConfig, whole: Layer, part: Layer, placement: Placement) -> Iterator[tuple[str, Share]]:
    """Yields the shares of the tensors of a layer of which a rank holds a part, by their names within it."""
    held = dict(tensors_of_layer(part, part.config))
    joined = [*zip(joined_in(whole, config), joined_in(part, part.config), strict=True)]
    for name, place in tensors_of_layer(whole, config):
        if name not in held:
            yield name, Share((), tuple(place.shape))
        elif place.shape != held[name].shape:
            yield name, Share(_cut(name, place, held[name], joined, placement), tuple(place.shape))


def _cut(name: str, whole: Tensor, part: Tensor, joined: Iterable[tuple[Joined, Joined]], placement: Placement) -> Cut:
    sizes = [([all_of_it], [held]) for all_of_it, held in zip(whole.shape, part.shape, strict=True)]
    for those, ours in joined:
        if name.startswith(those.name):
            sizes[those.axis] = list(those.sizes), list(ours.sizes)
    return tuple(tuple(_slices(*along, placement)) for along in sizes)


def _slices(whole: list[int], held: list[int], placement: Placement) -> Iterator[slice]:
    """Yields the slices of parts that lie side by side, of which a rank holds `held` numbers each."""
    start = 0
    for size, length in zip(whole, held, strict=True):
        # several ranks hold the same slice where there are more ranks than slices
        slices = size // max(length, 1)
        mine = start + length * (placement.rank * slices // placement.ranks)
        yield slice(mine, mine + length)
        start += size
