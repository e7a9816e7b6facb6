"""Checkpoints that compressed-tensors itself writes, where it is installed: the weights that it decompresses them to.

Release 0.20 writes no groups of columns that lie apart (act-order).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import pad

from rooftile.models import Decoder
from tests.models.quantised import merged_modules, plain

pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

PRESETS = {
    "W4A16": "int4", "W4A16_ASYM": "int4", "W8A16": "w8", "W8A8": "int8", "FP8": "fp8", "FP8_DYNAMIC": "fp8",
    "FP8_BLOCK": "fp8_tile", "MXFP8A16": "mxfp8", "MXFP4A16": "mxfp4", "NVFP4A16": "nvfp4",
}  # fmt: skip


def compressed(preset: str, folder: Path) -> transformers.PreTrainedModel:
    """Writes a checkpoint of a preset as llm-compressor does, and returns the model with decompressed weights."""
    model = plain(folder, hidden_size=128, intermediate_size=384)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            set_scales(module, module.quantization_scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return model


def set_scales(module: nn.Module, how: Any) -> None:
    """Sets what a calibration sets."""
    w = module.weight.detach()
    low, high = bounds(w, str(how.strategy), how.group_size)
    outer = None
    if hasattr(module, "weight_global_scale"):
        outer = generate_gparam(w.amin(), w.amax())
        module.weight_global_scale.data.copy_(outer)
    scales, zeros = calculate_qparams(low, high, how, global_scale=outer)
    module.weight_scale.data.copy_(scales.view(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zeros.view(module.weight_zero_point.shape))
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(0.02)
    module.quantization_status = QuantizationStatus.FROZEN


def bounds(w: Tensor, strategy: str, group: int | None) -> tuple[Tensor, Tensor]:
    """Returns the least and the largest weight of each part with a scale of its own."""
    if strategy == "block":
        tiles = pad(w, (0, -w.shape[1] % 128, 0, -w.shape[0] % 128)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        return tiles.amin((1, 3)), tiles.amax((1, 3))
    if group:
        return w.unflatten(1, (-1, group)).amin(-1), w.unflatten(1, (-1, group)).amax(-1)
    if strategy == "channel":
        return w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    return w.amin(), w.amax()


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_are_those_that_it_decompresses(preset: str, tmp_path: Path) -> None:
    model = compressed(preset, tmp_path)
    decoder = Decoder.from_folder(tmp_path)
    for ours, layer in zip(decoder.layers, model.model.layers, strict=True):
        for name, modules in merged_modules(layer).items():
            projection = ours.get_submodule(name)
            assert {part.format for part in projection.parts} == {PRESETS[preset]}
            weight = torch.cat([module.weight for module in modules])
            # it decompresses block formats to bf16
            assert torch.equal(projection.dequantised().to(weight.dtype), weight), name
            assert weight.std() > 0.1
