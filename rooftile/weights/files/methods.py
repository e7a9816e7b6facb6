"""The ways of quantising that are read, where a folder says which it has, and what to do with a checkpoint in another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rooftile.errors import InvalidInput
from rooftile.weights.files.settings import Settings, read_json

READ = ("compressed-tensors", "gptq", "awq", "fp8", "modelopt", "torchao", "rooftile")
# ModelOpt's own file; its older versions write nothing into config.json
_OF_MODELOPT = "hf_quant_config.json"
_FORMAT = 'weights="int4" or another format'
FROM_16_BITS = f"give the 16-bit checkpoint and {_FORMAT}"
_DEQUANTISE = f"load it with Transformers, dequantise it there (model.dequantize()) and save it, then give {_FORMAT}"
_DEQUANTISE_GGUF = (
    f"load it with Transformers, AutoModelForCausalLM.from_pretrained(folder, gguf_file=...), and save it, then give {_FORMAT}"
)
_ADVICE = {
    "auto-round": f'export it from AutoRound with format="auto_gptq" or "llm_compressor", or {FROM_16_BITS}',
    "bitsandbytes": _DEQUANTISE,
    "gguf": _DEQUANTISE_GGUF,
    "higgs": _DEQUANTISE,
    "marlin": f"give the GPTQ checkpoint that it was made from, or the 16-bit checkpoint and {_FORMAT}",
    "mxfp4": f"load it with Transformers and quantization_config=Mxfp4Config(dequantize=True), and save it, then give {_FORMAT}",
}


def section_of(folder: Path) -> Mapping[str, Any]:
    """Returns a folder's quantization_config, or what ModelOpt has in a file of its own; nothing where weights are plain."""
    section: Mapping[str, Any] = read_json(folder / "config.json").get("quantization_config") or {}
    if not section and (folder / _OF_MODELOPT).exists():
        section = read_json(folder / _OF_MODELOPT).get("quantization") or {}
        # a folder that names no algorithm has quantised its cache alone
        section = {"quant_method": "modelopt", **section} if section.get("quant_algo") else {}
    return section


def check_method(settings: Settings, also: tuple[str, ...] = ()) -> None:
    """Refuses a checkpoint that is quantised in a way that is not read.

    Args:
        settings: of its config.json.
        also: ways in which its family is read beside the usual ones.

    Raises:
        InvalidInput: it is; the sentence says what to convert it with.
    """
    method = _method(settings)
    if method is not None and method not in (*READ, *also):
        advice = _ADVICE.get(method, FROM_16_BITS)
        raise settings.refused(f"says the weights are quantised ({method[:60]}); read are {', '.join(READ)}: {advice}")


def _method(settings: Settings) -> str | None:
    """Returns the name of the tool that has quantised a checkpoint; None where nothing has."""
    section = settings.section("quantization_config")
    named = section.get("quant_method")
    if named is not None:
        return str(named)
    # their folders name no method, but have settings that no others have
    if settings.values.get("quip_params"):
        return "quip"
    if isinstance(settings.values.get("quantization"), Mapping):
        return "mlx"
    if section.get("load_in_4bit") or section.get("load_in_8bit"):
        return "bitsandbytes"
    return "no method named" if section else None


def refuse_gguf(path: Path) -> None:
    """Refuses a GGUF file, or a folder that has one in place of a checkpoint.

    Raises:
        InvalidInput: it is one; the sentence says what to convert it with.
    """
    found = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if found:
        raise InvalidInput(f"{found[0]} is GGUF; read are safetensors: {_DEQUANTISE_GGUF}")
