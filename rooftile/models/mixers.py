"""Says what mixes the tokens of a layer: exact attention, Native Sparse Attention with its sizes, or a recurrence.

In config.json `layer_mixers` names one mixer per layer, and a section of a mixer's name has its sizes:

    "layer_mixers": ["native_sparse", "attention"],
    "native_sparse": {"length": 32, "stride": 16, "block_size": 64, "count": 16, "window": 512, "compression": "mlp"}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
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
MIXERS: dict[str, int] = {
    "attention": 1, "native_sparse": BRANCHES, "linear": 1, "performer": 1, "mamba": 0, "mamba2": 0, "delta": 0, "latent": 1,
}  # fmt: skip


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


# the sizes of mixers that any family's config.json may name
SPARSE: dict[str, type] = {"native_sparse": NativeSparseSizes}


def mixers_of(settings: Settings, layers: int, sections: Mapping[str, type] = SPARSE) -> dict[str, Any]:
    """Reads the fields of a `ModelConfig` that say what mixes tokens; none if config.json says nothing.

    Args:
        settings: config.json.
        layers: how many layers there are.
        sections: the mixers beside "attention" that it may name, with the class of their sizes.

    Raises:
        InvalidInput: it names no such mixers, or sizes that make no sense.
    """
    said = settings.values.get("layer_mixers")
    known, given = ["attention", *sections], [name for name in sections if settings.section(name)]
    if said is None:
        if given:
            raise settings.refused(f"has {given[0]} and no layer_mixers, which must name the mixer of each layer")
        return {}
    if not isinstance(said, list) or len(said) != layers or any(name not in known for name in said):
        raise settings.refused(
            f"has layer_mixers {repr(said)[:60]}; must be {' or '.join(map(repr, known))} for each of {layers} layers"
        )
    idle = next((name for name in given if name not in said), None)
    if idle is not None:
        raise settings.refused(f"has {idle} and no layer with it in layer_mixers; name its layers there, or leave it out")
    return {"mixers": tuple(said)} | {
        name: section_of(settings, name, kind) if name in said else None for name, kind in sections.items()
    }


def section_of(settings: Settings, name: str, kind: type, **read: Any) -> Any:
    """Reads a section of config.json into a record whose fields have the names of its settings.

    Args:
        settings: config.json.
        name: the section's name.
        kind: the record's class, a dataclass.
        read: fields that have been read already.

    Raises:
        InvalidInput: a setting is unknown or missing, or makes no sense.
    """
    said, known = settings.section(name), fields(kind)
    unknown = next((one for one in said if one not in [field.name for field in known]), None)
    if unknown is not None:
        raise settings.refused(f"has {name}.{unknown[:40]}; has {', '.join(field.name for field in known)}")
    said = said | read
    missing = next((field.name for field in known if field.default is MISSING and field.name not in said), None)
    if missing is not None:
        raise settings.refused(f"has no {name}.{missing}; it must be there, as layers have {name}")
    try:
        return kind(**said)
    except InvalidInput as error:
        raise settings.refused(f"has {name} of which {error}") from None
