"""`save`: a prepared model as a checkpoint, of compressed-tensors or in our own layout of 2:4 weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from rooftile.errors import InvalidInput
from rooftile.qat import two_four
from rooftile.qat.compressed import LAYOUTS, configuration, tensors_of
from rooftile.qat.layers import Prepared, PreparedEmbedding, described
from rooftile.qat.preparation import prepared_layers
from rooftile.qat.product import Rounding
from rooftile.qat.quantised_linear import sparse_weight
from rooftile.qat.two_four import LAYOUT

# bytes of one file, at most
SHARD = 5 << 30


@runtime_checkable
class Checkpointed(Protocol):
    """A model that says how it is stored, as `rooftile.models.TrainableDecoder` does."""

    def settings(self) -> dict[str, Any]:
        """The contents of config.json."""

    def stored(self) -> Iterable[tuple[str, Tensor]]:
        """Yields each tensor by its name in the checkpoint."""


def save(model: nn.Module, folder: str | Path, *, layout: str = "dense") -> None:
    """Writes a prepared model as a checkpoint of compressed-tensors, which `rooftile.LLM`, vLLM and Transformers read.

    Codes are taken from the parameters in their own dtype, as in training. What is not rounded is written as it is. An embedding
    is written as the numbers that it is rounded to. The tokenizer's files are yours to add.

    Args:
        model: of Transformers, or a `rooftile.models.TrainableDecoder`; not converted.
        folder: one that is not there yet, or empty.
        layout: of 2:4 weights: "dense" writes their zeros, too, so that every program reads them; "two_four" writes what is kept
            and its places, for `rooftile.LLM` alone: layers that are not rounded, or rounded to fp8.

    Raises:
        InvalidInput: the model is not prepared or cannot be stored so, or the folder is in use.

    Example:
        >>> rooftile.qat.save(model, "my-model-int4")
        >>> rooftile.LLM("my-model-int4").generate("def ")
    """
    folder = Path(folder)
    layers = prepared_layers(model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInput(f"{folder} is there already; give a new folder")
    _check_layout(layers, layout)
    _check_shared(model)
    named, settings = _contents(model)
    linear = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Linear)}
    if layout == LAYOUT:
        held, section = _sparse(layers, named)
    else:
        held, section = _dense(layers, named, linear)
    folder.mkdir(parents=True, exist_ok=True)
    _write(held, folder)
    text = json.dumps(settings | section, indent=2)
    (folder / "config.json").write_text(text, encoding="utf-8")


def _check_layout(layers: Sequence[tuple[str, Prepared]], layout: str) -> None:
    if layout not in ("dense", LAYOUT):
        raise InvalidInput(f"layout is {layout!r}; must be 'dense' or {LAYOUT!r}")
    for name, layer in layers:
        rounding, embedding = layer.qat.rounding, isinstance(layer, PreparedEmbedding)
        if layout == LAYOUT and not embedding and (layer.qat.masking is None or (rounding and rounding.format != "fp8")):
            words = described(layer.qat)
            raise InvalidInput(f"{name} is {words}; the layout {LAYOUT!r} has 2:4 alone or with fp8: leave layout out")
        if layout != LAYOUT and rounding and rounding.format not in LAYOUTS and not embedding:
            raise InvalidInput(f"{name} is in {rounding.format}; written are {', '.join(LAYOUTS)}")


def _dense(
    layers: Sequence[tuple[str, Prepared]], named: dict[str, Tensor], linear: set[int]
) -> tuple[dict[str, Tensor], dict[str, Any]]:  # fmt: skip
    """The tensors in the layouts of compressed-tensors, and the quantization_config, where anything is rounded."""
    codes = {id(layer.weight): layer.codes() for _, layer in layers if layer.qat.rounding is not None}
    masked = {id(layer.weight): layer.kept_weight().detach() for _, layer in layers if layer.qat.rounding is None}
    plain = {id(layer.weight) for _, layer in layers if isinstance(layer, PreparedEmbedding)}
    held: dict[str, Tensor] = {}
    formats: dict[str, Rounding] = {}
    roundings = {id(layer.weight): layer.qat.rounding for _, layer in layers if layer.qat.rounding is not None}
    for name, x in named.items():
        weight, module = codes.get(id(x)), name.removesuffix(".weight")
        if weight is None:
            held[name] = masked.get(id(x), x.detach())
        elif id(x) in plain:
            held[name] = weight.dequantise(x.dtype)
        else:
            formats[module] = roundings[id(x)]
            held |= {f"{module}.{suffix}": part for suffix, part in tensors_of(weight).items()}
    kept = [name.removesuffix(".weight") for name, x in named.items() if id(x) in linear - codes.keys()]
    # a model that is masked alone is a plain one with zeros
    return held, {"quantization_config": quantization_config(formats, kept)} if codes else {}


def _sparse(layers: Sequence[tuple[str, Prepared]], named: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors in our own layout of 2:4 weights, and its quantization_config."""
    found = {id(layer.weight): layer for _, layer in layers}
    held: dict[str, Tensor] = {}
    modules = []
    for name, x in named.items():
        layer, module = found.get(id(x)), name.removesuffix(".weight")
        if layer is None:
            held[name] = x.detach()
        elif isinstance(layer, PreparedEmbedding):
            held[name] = layer.codes().dequantise(x.dtype)
        else:
            modules.append(module)
            held |= {f"{module}.{suffix}": part for suffix, part in two_four.tensors_of(sparse_weight(layer)).items()}
    return held, {"quantization_config": two_four.configuration(modules)}


def _contents(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a model by their names in a checkpoint, each once, and its config.json."""
    if isinstance(model, Checkpointed):
        return dict(model.stored()), model.settings()
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise InvalidInput(
            f"{type(model).__name__} has no configuration of Transformers, so nobody could read its checkpoint; convert it, and "
            "save its state dict"
        )
    settings = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    named: dict[int, tuple[str, Tensor]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        named.setdefault(id(x), (name, x))
    return dict(named.values()), settings


def _check_shared(model: nn.Module) -> None:
    """Refuses a weight that one layer rounds and another does not."""
    users: dict[int, list[tuple[str, bool]]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            users.setdefault(id(layer.weight), []).append((name, isinstance(layer, Prepared)))
    for found in users.values():
        if len({rounds for _, rounds in found}) > 1:
            rounded, other = (next(name for name, rounds in found if rounds is wanted) for wanted in (True, False))
            raise InvalidInput(f"{rounded} and {other} share a weight, and only {rounded} is prepared; prepare both, or neither")


def quantization_config(formats: Mapping[str, Rounding], kept: Iterable[str]) -> dict[str, Any]:
    """Returns the quantization_config of layers by their names.

    kept: linear layers that stay.
    """
    schemes: dict[tuple[str, int | None], list[str]] = {}
    for name, rounding in formats.items():
        schemes.setdefault((rounding.format, rounding.group), []).append(name)
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
