"""Writes a quantised checkpoint in the layouts of compressed-tensors, shard by shard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.matmul import QuantisedWeight, quantise_weight, weight_format
from rooftile.matmul.packing import pack_words, unpack
from rooftile.models.checkpoints import weights
from rooftile.models.checkpoints.places import projections_of
from rooftile.models.config import ModelConfig
from rooftile.models.layers import Layer, Memory
from rooftile.models.settings import read_json

_INT = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_FP8 = _INT | {"type": "float"}
_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
# without the scales' dtype compressed-tensors takes mxfp8 for FP8
_BLOCKS = {"strategy": "group", "group_size": 32, "type": "float", "symmetric": True, "scale_dtype": "torch.uint8"}

# the layout of each format, and how it describes weights and activations
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "fp8": ("float-quantized", _FP8, _TOKEN),
    "fp8_tile": (
        "float-quantized", _FP8 | {"strategy": "block", "block_structure": [128, 128]},
        _TOKEN | {"strategy": "group", "group_size": 128},
    ),
    "int8": ("int-quantized", _INT, _TOKEN | {"type": "int"}),
    # what Transformers expects of weights in 8 bits whose activations stay in 16
    "w8": ("pack-quantized", _INT, None),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}, None),
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8} | _BLOCKS, None),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4} | _BLOCKS, None),
}  # fmt: skip


def quantise_folder(
    folder: Path, out: Path, format: str, *, group: int | None = None, say: Callable[[str], None] | None = None
) -> None:  # fmt: skip
    """Quantises the projections of a 16-bit checkpoint, and copies all else.

    Args:
        folder: the checkpoint.
        out: a folder that is not there yet, or empty.
        format: a word of `quantise_weight`, but for nvfp4.
        group: of int4.
        say: is told the progress.

    Raises:
        InvalidInput: the folder is no such checkpoint, `out` is in use, or a weight cannot be quantised.
    """
    weight_format(format)
    if format not in LAYOUTS:
        raise InvalidInput(f"format is {format!r}; written are {', '.join(LAYOUTS)}")
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


def configuration(format: str, group: int | None) -> dict[str, Any]:
    """Returns the quantization_config of a format."""
    layout, described, inputs = LAYOUTS[format]
    if format == "int4":
        described = described | {"group_size": group or 128}
    scheme = {"targets": ["Linear"], "weights": described, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": scheme}, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": None,
    }  # fmt: skip


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


def tensors_of(weight: QuantisedWeight) -> dict[str, Tensor]:
    """Returns the tensors of a weight by the last parts of their names."""
    N, K = weight.shape
    if weight.format in ("int4", "w8"):
        words = pack_words(unpack(weight.codes, K)) if weight.format == "int4" else _words_of_bytes(weight.codes)
        return {"weight_packed": words, "weight_scale": weight.scales, "weight_shape": torch.tensor([N, K])}
    name = "weight_packed" if weight.format == "mxfp4" else "weight"
    return {name: weight.codes, "weight_scale": weight.scales}


def _words_of_bytes(codes: Tensor) -> Tensor:
    """Codes of int8 (N, K) plus 128, four in an int32 along K, the first in the lowest byte."""
    padded = torch.nn.functional.pad((codes.to(torch.int16) + 128).to(torch.uint8), (0, -codes.shape[1] % 4))
    return padded.contiguous().view(torch.int32)
