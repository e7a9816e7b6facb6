"""The ways of quantising that are read, and what to do with a checkpoint in another one."""

from __future__ import annotations

from rooftile.models.settings import Settings

READ = ("compressed-tensors", "gptq", "awq", "fp8", "modelopt", "torchao")
_CONVERT = "load it with Transformers, dequantise it there (model.dequantize()) and save it, then give weights="
_ADVICE = {
    "bitsandbytes": _CONVERT,
    "exl2": "give the 16-bit checkpoint and weights=",
    "marlin": "give the GPTQ checkpoint that it was made from",
}


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
