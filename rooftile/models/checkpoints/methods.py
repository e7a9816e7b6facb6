"""The ways of quantising that are read, where a folder says which it has, and what to do with a checkpoint in another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rooftile.models.settings import Settings, read_json

READ = ("compressed-tensors", "gptq", "awq", "fp8", "modelopt", "torchao", "rooftile")
# ModelOpt's own file; its older versions write nothing into config.json
_OF_MODELOPT = "hf_quant_config.json"
_CONVERT = "load it with Transformers, dequantise it there (model.dequantize()) and save it, then give weights="
_ADVICE = {
    "bitsandbytes": _CONVERT,
    "exl2": "give the 16-bit checkpoint and weights=",
    "marlin": "give the GPTQ checkpoint that it was made from",
}


def section_of(folder: Path) -> Mapping[str, Any]:
    """Returns a folder's quantization_config, or what ModelOpt has in a file of its own; nothing where weights are plain."""
    section: Mapping[str, Any] = read_json(folder / "config.json").get("quantization_config") or {}
    if not section and (folder / _OF_MODELOPT).exists():
        section = read_json(folder / _OF_MODELOPT).get("quantization") or {}
        # a folder that names no algorithm has quantised its cache alone
        section = {"quant_method": "modelopt", **section} if section.get("quant_algo") else {}
    return section


def check_method(settings: Settings) -> None:
    """Refuses a checkpoint that is quantised in a way that is not read.

    Raises:
        InvalidInput: it is; the sentence says what to convert it with.
    """
    section = settings.section("quantization_config")
    if not section:
        return
    method = section.get("quant_method", "no method named")
    if method not in READ:
        advice = _ADVICE.get(str(method), "give a checkpoint in bfloat16, float16 or float32")
        raise settings.refused(
            f"says the weights are quantised ({str(method)[:60]}); read are {', '.join(READ)}: {advice}"
        )
