"""Writes a quantised checkpoint in the layouts of compressed-tensors, shard by shard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.matmul import quantise_weight, weight_format
from rooftile.models.checkpoints import weights
from rooftile.models.checkpoints.places import projections_of
from rooftile.models.config import ModelConfig
from rooftile.models.layers import Layer, Memory
from rooftile.models.settings import read_json
from rooftile.qat.compressed import configuration, tensors_of


def quantise_folder(
    folder: Path, out: Path, format: str, *, group: int | None = None, say: Callable[[str], None] | None = None
) -> None:  # fmt: skip
    """Quantises the projections of a 16-bit checkpoint, and copies all else.

    Args:
        folder: the checkpoint.
        out: a folder that is not there yet, or empty.
        format: a word of `quantise_weight`.
        group: of int4.
        say: is told the progress.

    Raises:
        InvalidInput: the folder is no such checkpoint, `out` is in use, or a weight cannot be quantised.
    """
    weight_format(format)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidInput(f"{out} is there already; give a new folder")
    config, files = ModelConfig.from_folder(folder), weights.files_of(folder)
    settings = read_json(folder / "config.json")
    if settings.get("quantization_config"):
        raise InvalidInput(f"the checkpoint {folder} is quantised already; give the 16-bit checkpoint")
    if config.family == "gpt2":
        raise InvalidInput(
            "GPT-2 keeps its weights the other way round, for which compressed-tensors has no layout; use weights="
        )
    modules = {f"model.{name}" for name in _modules(config)}
    out.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for n, path in enumerate(files, 1):
        if say is not None:
            say(f"{path.name}, {n} of {len(files)}")
        index |= _write_shard(path, out / path.name, modules, format, group)
    if len(files) > 1:
        text = json.dumps({"metadata": {}, "weight_map": index}, indent=2)
        (out / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    text = json.dumps(settings | {"quantization_config": configuration(format, group)}, indent=2)
    (out / "config.json").write_text(text, encoding="utf-8")
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja", ".model", ".txt") and not (out / path.name).exists() and "index" not in path.name:
            shutil.copy(path, out / path.name)


def _modules(config: ModelConfig) -> list[str]:
    layer = Layer(config, Memory(config.dtype, torch.device("meta")), waits=True)
    names = [name for _, parts in projections_of(layer, config) for name in parts]
    return [f"layers.{n}.{name}" for n in range(config.layers) for name in names]


def _write_shard(path: Path, out: Path, modules: set[str], format: str, group: int | None) -> dict[str, str]:
    from safetensors import safe_open
    from safetensors.torch import save_file

    found: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as file:
        # an open file has keys() and cannot be iterated
        names: list[str] = file.keys()
        for name in names:
            x, module = file.get_tensor(name), name.removesuffix(".weight")
            full = module if module.startswith("model.") else f"model.{module}"
            if name == module or full not in modules:
                found[name] = x
                continue
            try:
                weight = quantise_weight(x, format, group=group)
            except InvalidInput as error:
                raise InvalidInput(f"{name} cannot be quantised to {format}: {error}") from None
            found |= {f"{module}.{suffix}": part.contiguous() for suffix, part in tensors_of(weight).items()}
    save_file(found, out, metadata={"format": "pt"})
    return dict.fromkeys(found, out.name)
