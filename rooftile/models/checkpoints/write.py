"""Writes a quantised checkpoint in the layouts of compressed-tensors, or a 2:4 one in our own, shard by shard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.models.checkpoints.names import names_of
from rooftile.models.checkpoints.places import projections_of
from rooftile.models.config import ModelConfig
from rooftile.models.layer_kinds import layer_of
from rooftile.models.placement import Placement
from rooftile.weights.files import two_four
from rooftile.weights.files.compressed_tensors import configuration, tensors_of
from rooftile.weights.files.folder import files_of
from rooftile.weights.files.formats import SPARSE, check_fits, check_word, weight_in
from rooftile.weights.files.settings import read_json
from rooftile.weights.formats import ROW, parsed
from rooftile.weights.two_four import TwoFour


def quantise_folder(
    folder: Path, out: Path, format: str, *, group: int | None = None, say: Callable[[str], None] | None = None
) -> None:  # fmt: skip
    """Quantises or masks the projections of a 16-bit checkpoint, and copies all else.

    Args:
        folder: the checkpoint.
        out: a folder that is not there yet, or empty.
        format: a word of `quantise_weight`, also with its group as in "int4:64", or "2:4".
        group: of int4.
        say: is told the progress.

    Raises:
        InvalidInput: the folder is no such checkpoint, `out` is in use, or a weight cannot be quantised.
    """
    word = _word(format, group)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidInput(f"{out} is there already; give a new folder")
    config, files = ModelConfig.from_folder(folder), files_of(folder)
    settings = read_json(folder / "config.json")
    if settings.get("quantization_config"):
        raise InvalidInput(f"the checkpoint {folder} is quantised already; give the 16-bit checkpoint")
    if config.wrapper is not None:
        raise InvalidInput(
            f"the checkpoint is a {config.wrapper}, whose text part is served, and no layout is written for the rest; give "
            "weights= to LLM instead"
        )
    if config.family == "gpt2":
        raise InvalidInput(
            "GPT-2 keeps its weights the other way round, for which no layout is written; give weights= to LLM instead"
        )
    if "experts" in config.feed_forwards:
        raise InvalidInput(
            "the model has experts, which stay in 16 bits, and for which no layout is written; give weights= to LLM for what is "
            "beside them"
        )
    modules = _modules(config)
    for name, K in modules.items():
        check_fits(name, word, K)
    out.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for n, path in enumerate(files, 1):
        if say is not None:
            say(f"{path.name}, {n} of {len(files)}")
        index |= _write_shard(path, out / path.name, set(modules), names_of(config).prefix, word)
    if len(files) > 1:
        text = json.dumps({"metadata": {}, "weight_map": index}, indent=2)
        (out / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    section = two_four.configuration(modules) if word == SPARSE else configuration(*parsed(word))
    text = json.dumps(settings | {"quantization_config": section}, indent=2)
    (out / "config.json").write_text(text, encoding="utf-8")
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja", ".model", ".txt") and not (out / path.name).exists() and "index" not in path.name:
            shutil.copy(path, out / path.name)


def _modules(config: ModelConfig) -> dict[str, int]:
    """Names the projections, with the numbers of their rows."""
    names, placement, found = names_of(config), Placement(config.dtype, torch.device("meta")), dict[str, int]()
    for n in range(config.layers):
        for projection, parts in projections_of(layer_of(config, n, placement, waits=True), config):
            found |= {f"{names.prefix}{names.layers}.{n}.{name}": projection.inputs for name in parts}
    return found


def _word(format: str, group: int | None) -> str:
    """Joins a format and its group to one word."""
    check_word(format)
    if group is None:
        return format
    if format != "int4":
        raise InvalidInput(f"group is {group} and format {format!r}; only int4 has groups, as in int4:64: leave group out")
    return f"{format}:{'row' if group == ROW else group}"


def _write_shard(path: Path, out: Path, modules: set[str], prefix: str, word: str) -> dict[str, str]:
    from safetensors import safe_open
    from safetensors.torch import save_file

    found: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as file:
        # an open file has keys() and cannot be iterated
        names: list[str] = file.keys()
        for name in names:
            x, module = file.get_tensor(name), name.removesuffix(".weight")
            full = module if module.startswith(prefix) else f"{prefix}{module}"
            if name == module or full not in modules:
                found[name] = x
                continue
            weight = weight_in(x, word, module)
            parts = two_four.tensors_of(weight) if isinstance(weight, TwoFour) else tensors_of(weight)
            found |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(found, out, metadata={"format": "pt"})
    return dict.fromkeys(found, out.name)
