"""The layouts of compressed-tensors: how a quantised weight is described in config.json, and by which tensors it is stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.weights import QuantisedWeight
from rooftile.weights.formats import ROW, TILE, weight_format
from rooftile.weights.packing import pack_words, unpack

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
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4} | _BLOCKS | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}, None,
    ),
}  # fmt: skip


def configuration(format: str, group: int | None, activations: str | None = None) -> dict[str, Any]:
    """Returns the quantization_config of a format; `activations` is a format that no layout brings."""
    layout, described, inputs = LAYOUTS[format]
    if activations is not None:
        inputs = {"num_bits": weight_format(activations).bits, "dynamic": True} | _BLOCKS
    if format == "int4":
        described = described | ({"strategy": "channel"} if group == ROW else {"group_size": group or TILE})
    scheme = {"targets": ["Linear"], "weights": described, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": scheme}, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": None,
    }  # fmt: skip


def tensors_of(weight: QuantisedWeight) -> dict[str, Tensor]:
    """Returns the tensors of a weight by the last parts of their names."""
    N, K = weight.shape
    if weight.format in ("int4", "w8"):
        words = pack_words(unpack(weight.codes, K)) if weight.format == "int4" else _words_of_bytes(weight.codes)
        return {"weight_packed": words, "weight_scale": weight.scales, "weight_shape": torch.tensor([N, K])}
    name = "weight_packed" if weight_format(weight.format).is_packed else "weight"
    found = {name: weight.codes, "weight_scale": weight.scales}
    # the file has the factor of the scales, whose inverse is ours
    return found if weight.outer is None else found | {"weight_global_scale": 1.0 / weight.outer.flatten()}


def _words_of_bytes(codes: Tensor) -> Tensor:
    """Codes of int8 (N, K) plus 128, four in an int32 along K, the first in the lowest byte."""
    padded = torch.nn.functional.pad((codes.to(torch.int16) + 128).to(torch.uint8), (0, -codes.shape[1] % 4))
    return padded.contiguous().view(torch.int32)
