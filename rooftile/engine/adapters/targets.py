"""`Target`: the rows of a decoder's projection that are one module of its checkpoint, for which an adapter may have a part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.models import Decoder, ModelConfig
from rooftile.models.checkpoints.names import names_of
from rooftile.models.checkpoints.places import projections_of
from rooftile.models.checkpoints.shares import shares_of
from rooftile.models.checkpoints.stored import Cut, slices_of
from rooftile.models.placement import Placement
from rooftile.models.projection import Projection

_ALL = (slice(None),)


class Target(NamedTuple):
    """A module of a checkpoint in a decoder.

    Args:
        place: the number of its projection.
        part: its number among the modules of its projection.
        inputs: the width of its input, on all ranks together.
        rows: how many rows it has, on all ranks together.
        cut: the slices of its rows and of its inputs that this rank holds.
    """

    place: int
    part: int
    inputs: int
    rows: int
    cut: Cut = (_ALL, _ALL)

    def held(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what a rank holds of A (r, inputs) and B (rows, r).

        Where the inputs are cut, the ranks add up what they project, and so the products with their parts of A.
        """
        rows, inputs = self.cut
        return slices_of(a, (_ALL, inputs)), slices_of(b, (rows, _ALL))


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

    Args:
        decoder: the decoder, or the part of it that a rank holds.
        whole: the configuration of the whole; None for the decoder's own.

    Raises:
        Unsupported: the decoder has layers whose projections are not all computed by themselves.
    """

    def __init__(self, decoder: Decoder, whole: ModelConfig | None = None) -> None:
        config = decoder.config
        if "latent" in config.mixers:
            raise Unsupported(
                f"adapters are asked for, and {config.family} has latent attention, which folds projections together"
            )
        self.family, self.dtype = config.family, decoder.placement.dtype
        self._names = names_of(config)
        self.projections: list[TargetProjection] = []
        self.modules: dict[str, Target] = {}
        sizes = _sizes_of(config if whole is None else whole, decoder.placement)
        for n, layer in enumerate(decoder.layers):
            for projection, parts in projections_of(layer, config):
                place = len(self.projections)
                self.projections.append(TargetProjection(projection, tuple(accumulate(parts.values(), initial=0))))
                for part, (name, rows) in enumerate(parts.items()):
                    name = f"{self._names.layers}.{n}.{name}"
                    inputs, rows, cut = sizes.get(name, (projection.inputs, rows, (_ALL, _ALL)))
                    self.modules[name] = Target(place, part, inputs, rows, cut)

    def find(self, module: str) -> Target | None:
        """Returns the target of a module by its name in Transformers' model; None if there is none."""
        name = module.removeprefix("model.language_model.").removeprefix("language_model.")
        return self.modules.get(self._names.without_prefix(name))

    def ends(self) -> str:
        """Returns the last words of the modules' names, for sentences."""
        return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in self.modules))


def _sizes_of(whole: ModelConfig, placement: Placement) -> dict[str, tuple[int, int, Cut]]:
    """Returns inputs, rows and the cut of the modules of which a rank holds a part."""
    found: dict[str, tuple[int, int, Cut]] = {}
    for name, (cut, shape) in (shares_of(whole, placement) if placement.ranks > 1 else {}).items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and len(shape) == 2:
            # GPT-2 keeps its weights as (in, out)
            (rows, inputs), (of_rows, of_inputs) = (shape[::-1], cut[::-1]) if whole.family == "gpt2" else (shape, cut)
            found[module] = inputs, rows, (of_rows, of_inputs)
    return found


def column_blocks(bounds: tuple[int, ...], size: int) -> Iterator[tuple[int, int, int]]:
    """Cuts the columns of a product into blocks of at most `size` that lie in one part: yields part, first column and end."""
    for part, (begin, end) in enumerate(pairwise(bounds)):
        for first in range(begin, end, size):
            yield part, first, end
