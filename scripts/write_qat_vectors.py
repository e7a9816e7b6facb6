"""Writes tests/qat/torchao_vectors.safetensors: weights as torchao's QAT rounds them while a model trains.

    pip install torchao==0.18.0; python -m scripts.write_qat_vectors

The tests hold the layers of `rooftile.qat` against these tensors: to the same bits where the rule is the same or torchao is given
our scales, and elsewhere to the rule that docs/how-to/train-for-a-format.md states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.write_weight_vectors import weight

VERSION = "0.18.0"
VECTORS = Path(__file__).parents[1] / "tests/qat/torchao_vectors.safetensors"


def inputs() -> Tensor:
    """Returns (8, 256) numbers: rows that differ, groups of zeros and of one sign, an outlier, ties."""
    return weight()[:8]


def given(w: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns our scales and zero points for words of `rooftile.qat.prepare`, so that torchao takes codes alone."""
    found = {"int8": w.abs().amax(1, keepdim=True) / 127}
    for word, half, group in (("w8", 127.5, 256), ("int4:128", 7.5, 128), ("int4:32", 7.5, 32)):
        found[word] = (w.unflatten(1, (-1, group)).abs().amax(-1) / half).bfloat16().float()
    # a group of zeros has the scale 1
    return {word: (scales + (scales == 0), torch.zeros_like(scales, dtype=torch.int32)) for word, scales in found.items()}


def by_torchao(w: Tensor) -> dict[str, Tensor]:
    """Returns rounded weights; `given, WORD` has our scales, and `inside, WORD` whether torchao lets a gradient pass there."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.prototype.qat import MXFakeQuantizeConfig
    from torchao.quantization.qat import Float8FakeQuantizeConfig, IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantize_config import Int4WeightFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import FakeQuantizerBase

    def rounded(config: Any, x: Tensor = w) -> Tensor:
        return FakeQuantizerBase.from_config(config)(x)

    found = {}
    for word, (scales, zeros) in given(w).items():
        group = 256 // scales.shape[1]
        dtype = torch.int4 if word.startswith("int4") else torch.int8
        quantiser = FakeQuantizerBase.from_config(IntxFakeQuantizeConfig(dtype, group_size=group, is_dynamic=False))
        quantiser.scale, quantiser.zero_point = scales, zeros
        x = w.clone().requires_grad_()
        y = quantiser(x)
        y.sum().backward()
        found |= {f"given, {word}": y.detach(), f"inside, {word}": x.grad.bool()}
    found["int8"] = rounded(IntxFakeQuantizeConfig(torch.int8, "per_channel"))
    found["int4:32"] = rounded(IntxFakeQuantizeConfig(torch.int4, group_size=32))
    found["int4:128, bf16 activations"] = rounded(Int4WeightFakeQuantizeConfig(128, torch.bfloat16))
    found["int4:128, fp8 activations"] = rounded(Int4WeightFakeQuantizeConfig(128, torch.float8_e4m3fn))
    found["activations in int8"] = rounded(IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False))
    found["fp8"] = rounded(Float8FakeQuantizeConfig())
    found["fp8, bf16"] = rounded(Float8FakeQuantizeConfig(), w.bfloat16())
    # its QAT makes these tensors inside of a product, by this rule unless it is told otherwise
    assert MXFakeQuantizeConfig().scaling_mode == ScaleCalculationMode.RCEIL
    for word, dtype in (("mxfp8", torch.float8_e4m3fn), ("mxfp4", torch.float4_e2m1fn_x2)):
        for rule, mode in (("floor", ScaleCalculationMode.FLOOR), ("round_up", ScaleCalculationMode.RCEIL)):
            found[f"{word}, {rule}"] = MXTensor.to_mx(w, dtype, 32, mode).dequantize(torch.float32)
    outer = per_tensor_amax_to_scale(w.abs().max())
    found["nvfp4"] = NVFP4Tensor.to_nvfp4(w, per_tensor_scale=outer).dequantize(torch.float32)
    return {name: x.contiguous() for name, x in found.items()}


def main() -> None:
    w = inputs()
    save_file({"weight": w} | by_torchao(w), VECTORS)


if __name__ == "__main__":
    main()
