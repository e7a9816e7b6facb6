"""`Target`: the rows of a decoder's projection that are one module of its checkpoint, for which an adapter may have a part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

from rooftile.errors import Unsupported
from rooftile.models import Decoder
from rooftile.models.checkpoints.names import names_of
from rooftile.models.checkpoints.places import projections_of
from rooftile.models.projection import Projection


class Target(NamedTuple):
    """A module of a checkpoint in a decoder.

    Args:
        place: the number of its projection.
        part: its number among the modules of its projection.
        inputs: the width of its input.
        rows: how many rows of the projection it has.
    """

    place: int
    part: int
    inputs: int
    rows: int


class TargetProjection(NamedTuple):
    """A projection, and the first rows of its parts, with the end of the last."""

    projection: Projection
    bounds: tuple[int, ...]

    @property
    def parts(self) -> int:
        """How many modules of the checkpoint it is made of."""
        return len(self.bounds) - 1


class Targets:
    """The projections of a decoder, and its modules by their names in a checkpoint, such as "layers.3.self_attn.q_proj".

    Raises:
        Unsupported: the decoder has layers whose projections are not all computed by themselves.
    """

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        if "latent" in config.mixers:
            raise Unsupported(
                f"adapters are asked for, and {config.family} has latent attention, which folds projections together"
            )
        self.family = config.family
        self._names = names_of(config)
        self.projections: list[TargetProjection] = []
        self.modules: dict[str, Target] = {}
        for n, layer in enumerate(decoder.layers):
            for projection, parts in projections_of(layer, config):
                place = len(self.projections)
                self.projections.append(TargetProjection(projection, tuple(accumulate(parts.values(), initial=0))))
                for part, (name, rows) in enumerate(parts.items()):
                    self.modules[f"{self._names.layers}.{n}.{name}"] = Target(place, part, projection.inputs, rows)

    def find(self, module: str) -> Target | None:
        """Returns the target of a module by its name in Transformers' model; None if there is none."""
        name = module.removeprefix("model.language_model.").removeprefix("language_model.")
        return self.modules.get(self._names.without_prefix(name))

    def ends(self) -> str:
        """Returns the last words of the modules' names, for sentences."""
        return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in self.modules))


def column_blocks(bounds: tuple[int, ...], size: int) -> Iterator[tuple[int, int, int]]:
    """Cuts the columns of a product into blocks of at most `size` that lie in one part: yields part, first column and end."""
    for part, (begin, end) in enumerate(pairwise(bounds)):
        for first in range(begin, end, size):
            yield part, first, end
