"""Says what mixes the tokens of a layer: exact attention, Native Sparse Attention with its sizes, or a recurrence.

In config.json `layer_mixers` names one mixer per layer, and `native_sparse` has the sizes, all of which have defaults:

    "layer_mixers": ["native_sparse", "attention"],
    "native_sparse": {"length": 32, "stride": 16, "block_size": 64, "count": 16, "window": 512, "compression": "mlp"}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rooftile.approximate.native_sparse.compression import check_lengths
from rooftile.approximate.native_sparse.selection import check_counts
from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import check_choice, check_count
from rooftile.runtime.words import answers_words
from rooftile.weights.files.settings import Settings

# keys and values of the compressed, the selected and the near branch
BRANCHES = 3
# the kinds of layers by their names, with how many keys and values a layer of the kind projects for each key head; 0 where it has
# no heads of attention
MIXERS: dict[str, int] = {"attention": 1, "native_sparse": BRANCHES, "mamba": 0, "mamba2": 0, "delta": 0, "latent": 1}


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSparseSizes:
    """The sizes of a model's layers with Native Sparse Attention; `rooftile.approximate.native_sparse` explains them.

    Args:
        length, stride, block_size, count, first, local, window: as in `rooftile.approximate.native_sparse`.
        compression: "mlp", "linear" or "mean": the map of a block of keys, or of values, to one.
        hidden: width of the MLP; 4 head_dim if None.

    Raises:
        InvalidInput: the sizes do not go together.
    """

    length: int = 32
    stride: int = 16
    block_size: int = 64
    count: int = 16
    first: int = 1
    local: int = 2
    window: int = 512
    compression: str = "mlp"
    hidden: int | None = None

    def __post_init__(self) -> None:
        check_lengths(self.length, self.stride, self.block_size)
        check_counts(self.count, self.first, self.local)
        check_count("window", self.window)
        check_choice("compression", self.compression, ("mlp", "linear", "mean"))
        if self.hidden is not None:
            check_count("hidden", self.hidden)

    def keywords(self) -> dict[str, Any]:
        """Returns the sizes of compression and choice, as keywords of `rooftile.approximate.native_sparse`."""
        return {name: getattr(self, name) for name in ("length", "stride", "block_size", "count", "first", "local")}


def mixers_of(settings: Settings, layers: int) -> dict[str, Any]:
    """Reads the fields of a `ModelConfig` that say what mixes tokens; none if config.json says nothing.

    Raises:
        InvalidInput: it names no such mixers, or sizes that make no sense.
    """
    said = settings.values.get("layer_mixers")
    sizes = settings.section("native_sparse")
    if said is None:
        if sizes:
            raise settings.refused("has native_sparse and no layer_mixers, which must name the mixer of each layer")
        return {}
    known = [name for name, pairs in MIXERS.items() if pairs and name != "latent"]
    if not isinstance(said, list) or len(said) != layers or any(name not in known for name in said):
        raise settings.refused(
            f"has layer_mixers {repr(said)[:60]}; must be {' or '.join(map(repr, known))} for each of {layers} layers"
        )
    return {"mixers": tuple(said), "native_sparse": _sizes(settings, sizes) if "native_sparse" in said else None}


def _sizes(settings: Settings, said: Mapping[str, Any]) -> NativeSparseSizes:
    names = [field.name for field in fields(NativeSparseSizes)]
    unknown = [name for name in said if name not in names]
    if unknown:
        raise settings.refused(f"has native_sparse.{unknown[0][:40]}; has {', '.join(names)}")
    try:
        return NativeSparseSizes(**said)
    except InvalidInput as error:
        raise settings.refused(f"has native_sparse of which {error}") from None
