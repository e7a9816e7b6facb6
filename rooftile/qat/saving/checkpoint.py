"""`save`: a prepared model as a checkpoint, of compressed-tensors or in our own layout of 2:4 weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, distributed, nn

from rooftile.errors import InvalidInput
from rooftile.nn.converted import Converted
from rooftile.nn.reading import ReadWeight
from rooftile.qat.convert import sparse_weight
from rooftile.qat.prepared.described import described
from rooftile.qat.prepared.found import prepared_layers
from rooftile.qat.prepared.layers import parameter_of
from rooftile.qat.prepared.rounded import Rounded
from rooftile.qat.rounding.codes import Rounding
from rooftile.qat.saving.codes_saved import check_converted, converted_layers, roundings, stored
from rooftile.qat.sharded import shards, whole, writes
from rooftile.qat.shared import check_shared
from rooftile.runtime.words import answers_foreign_words
from rooftile.weights.files import two_four
from rooftile.weights.files.compressed_tensors import configuration, tensors_of
from rooftile.weights.files.two_four import LAYOUT

# bytes of one file, at most
SHARD = 5 << 30
# the layout of plain numbers
NUMBERS = "numbers"
# the model types of Transformers whose classes read `weight` of what should be a linear layer, also where it is quantised
READING = ("t5", "mt5", "umt5", "longt5", "switch_transformers", "udop", "pop2piano")


@runtime_checkable
class Checkpointed(Protocol):
    """A model that says how it is stored, as `rooftile.models.TrainableDecoder` does."""

    def settings(self) -> dict[str, Any]:
        """The contents of config.json."""

    def stored(self) -> Iterable[tuple[str, Tensor]]:
        """Yields each tensor by its name in the checkpoint."""


@answers_foreign_words
def save(model: nn.Module, folder: str | Path, *, layout: str = "dense") -> None:
    """Writes a prepared or converted model as a compressed-tensors checkpoint, which `rooftile.LLM`, vLLM and Transformers read.

    Codes are taken from the parameters in their own dtype, as in training. What is not rounded is written as it is. An embedding
    is written as the numbers that it is rounded to, and so are fused experts, `nn.MultiheadAttention` and GPT-2's Conv1D. The
    tokenizer's files are yours to add. Where FSDP has sharded the model, all
    processes call this; parameters are gathered one by one, and the first process writes.

    Args:
        model: of Transformers, or a `rooftile.models.TrainableDecoder` that is not converted.
        folder: one that is not there yet, or empty.
        layout: "numbers" writes the rounded numbers as plain weights, in as many bytes as before, for who reads no codes;
            of 2:4 weights "dense" writes their zeros, too, so that every program reads them, and "two_four" what is kept and its
            places, for `rooftile.LLM` alone: layers that are not rounded, or rounded to fp8 or int8.

    Raises:
        InvalidInput: the model is not prepared or cannot be stored so, or the folder is in use.

    Example:
        >>> rooftile.qat.save(model, "my-model-int4")
        >>> rooftile.LLM("my-model-int4").generate("def ")
    """
    folder = Path(folder)
    converted = converted_layers(model) if isinstance(model, nn.Module) else {}
    layers = [] if converted else prepared_layers(model)
    is_sharded = shards(model) is not None
    if (is_sharded or writes()) and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInput(f"{folder} is there already; give a new folder")
    _check_layout(layers, layout)
    if converted:
        _save_converted(model, converted, folder, layout)
        return
    check_shared(model)
    _check_readable(model, layers, layout)
    # FSDP puts its shards back for this, so names come before weights
    named, settings = _contents(model)
    held: dict[str, Tensor] = {}
    for name, x in _stored(named, layers, layout):
        if writes():
            held[name] = x.cpu() if is_sharded else x
    if writes():
        folder.mkdir(parents=True, exist_ok=True)
        _write(held, folder)
        text = json.dumps(settings | _section(model, named, layers, layout), indent=2)
        (folder / "config.json").write_text(text, encoding="utf-8")
    if is_sharded:
        # no reader sees the folder before it is written
        distributed.barrier()


def _save_converted(model: nn.Module, layers: dict[str, Converted], folder: Path, layout: str) -> None:
    if isinstance(model, Checkpointed):
        raise InvalidInput(
            f"the {type(model).__name__} is converted, so it has no weights by their names; save it before it is converted"
        )
    check_converted(layers, layout)
    _check_readable(model, layers, layout)
    settings = _settings(model)
    if not writes():
        return
    folder.mkdir(parents=True, exist_ok=True)
    _write(dict(stored(model, layers, layout)), folder)
    if layout == LAYOUT:
        settings |= {"quantization_config": two_four.configuration(layers)}
    elif layout != NUMBERS:
        formats, kept = roundings(model, layers)
        settings |= {"quantization_config": quantization_config(formats, kept)} if formats else {}
    (folder / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _check_readable(model: nn.Module, layers: Collection[Any], layout: str) -> None:
    """Refuses codes for a model whose classes in Transformers read the weights of its layers, which codes do not have."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in READING and layers and layout != NUMBERS:
        raise InvalidInput(
            f"Transformers cannot read a quantised {kind}: its classes ask their layers for weights; write layout={NUMBERS!r}, "
            "which stores the rounded numbers as plain weights"
        )


def _check_layout(layers: Sequence[tuple[str, Rounded]], layout: str) -> None:
    if layout not in ("dense", NUMBERS, LAYOUT):
        raise InvalidInput(f"layout is {layout!r}; must be 'dense', {NUMBERS!r} or {LAYOUT!r}")
    for name, layer in layers:
        rounding = layer.qat.rounding
        fits = layer.qat.masking is not None and (rounding is None or rounding.format in ("fp8", "int8"))
        if layout == LAYOUT and not fits and layer.stores_codes:
            words = described(layer.qat)
            raise InvalidInput(f"{name} is {words}; the layout {LAYOUT!r} has 2:4 alone or with fp8 or int8: leave layout out")


def _stored(
    named: Mapping[str, Tensor], layers: Sequence[tuple[str, Rounded]], layout: str
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Yields the tensors of a checkpoint: tensors of prepared layers as they are served, all else as it is."""
    found = {id(layer.parameter): layer for _, layer in layers}
    learned = {id(layer.scales) for _, layer in layers}
    for name, x in named.items():
        layer = found.get(id(x))
        if id(x) in learned:
            continue
        if layer is None:
            yield name, whole(x.detach())
        elif layout != LAYOUT and layer.qat.rounding is None:
            # a weight that is masked alone is a plain one with zeros
            yield name, layer.kept_weight().detach()
        elif layout == NUMBERS or not _has_parts(layer, layers):
            yield name, layer.as_stored(layer.codes().dequantise(x.dtype))
        else:
            parts = two_four.tensors_of(sparse_weight(layer)) if layout == LAYOUT else tensors_of(layer.codes())
            for suffix, part in parts.items():
                yield f"{name.removesuffix('.weight')}.{suffix}", part


def _has_parts(layer: Rounded, layers: Sequence[tuple[str, Rounded]]) -> bool:
    """Whether a layer is stored as codes, and no other that shares its weight as plain numbers."""
    return layer.stores_codes and all(other.stores_codes for _, other in layers if other.parameter is layer.parameter)


def _section(
    model: nn.Module, named: Mapping[str, Tensor], layers: Sequence[tuple[str, Rounded]], layout: str
) -> dict[str, Any]:  # fmt: skip
    """The quantization_config of a model, under its key; nothing where all weights are plain ones."""
    found = {id(layer.parameter): layer for _, layer in layers if _has_parts(layer, layers)}
    modules = {name.removesuffix(".weight"): found[id(x)] for name, x in named.items() if id(x) in found}
    if layout == LAYOUT:
        return {"quantization_config": two_four.configuration(modules)}
    rounded = {id(layer.parameter) for _, layer in layers if layer.qat.rounding is not None}
    if not rounded or layout == NUMBERS:
        return {}
    formats = {name: layer.qat.rounding for name, layer in modules.items() if layer.qat.rounding is not None}
    if not formats:
        return {}
    linear = {id(parameter_of(layer)) for layer in model.modules() if isinstance(layer, nn.Linear)}
    stored_as_codes = {id(layer.parameter) for layer in modules.values() if layer.qat.rounding is not None}
    # a tied head is stored under the embedding's name, and Transformers asks for its own
    names = named if isinstance(model, Checkpointed) else model.state_dict(keep_vars=True)
    kept = [name.removesuffix(".weight") for name, x in names.items() if id(x) in linear - stored_as_codes]
    return {"quantization_config": quantization_config(formats, kept)}


def _contents(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a model by their names in a checkpoint, each once, and its config.json."""
    if isinstance(model, Checkpointed):
        # a model may name what it reads from its layers
        named = {name: x.owner.parameter_to_change() if isinstance(x, ReadWeight) else x for name, x in model.stored()}
        return named, model.settings()
    settings = _settings(model)
    found: dict[int, tuple[str, Tensor]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        found.setdefault(id(x), (name, x))
    return dict(found.values()), settings


def _settings(model: nn.Module) -> dict[str, Any]:
    """The config.json of a model of Transformers."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise InvalidInput(
            f"{type(model).__name__} has no configuration of Transformers, so no program reads its checkpoint; convert it, and "
            "save its state dict"
        )
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    return settings


def quantization_config(formats: Mapping[str, Rounding], kept: Iterable[str]) -> dict[str, Any]:
    """Returns the quantization_config of layers by their names.

    kept: linear layers that stay.
    """
    schemes: dict[tuple[str, int | None, str | None], list[str]] = {}
    for name, rounding in formats.items():
        schemes.setdefault((rounding.format, rounding.group, rounding.activations), []).append(name)
    found = {key: configuration(*key) for key in schemes}
    whole = next(iter(found.values()), configuration("w8", None)) | {"ignore": list(kept)}
    if len(found) == 1:
        return whole
    groups = {}
    for n, (key, names) in enumerate(schemes.items()):
        one = found[key]
        groups[f"group_{n}"] = one["config_groups"]["group_0"] | {"targets": names, "format": one["format"]}
    return whole | {"format": "mixed-precision", "config_groups": groups}


def _write(held: Mapping[str, Tensor], folder: Path) -> None:
    """Writes tensors to as many files as they need."""
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, x in held.items():
        if shards[-1] and size + x.nbytes > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = x.cpu().contiguous()
        size += x.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for n, shard in enumerate(shards, 1):
        file = f"model-{n:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    text = json.dumps({"metadata": {}, "weight_map": index}, indent=2)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
