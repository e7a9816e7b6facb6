"""Writes tests/weights/weight_vectors.safetensors: one weight as compressed-tensors and torchao quantise and store it.

    pip install compressed-tensors==0.20.0 torchao==0.18.0 safetensors; python scripts/write_weight_vectors.py

The tests hold `quantise_weight` and the readers of checkpoints against these tensors, and the tensors against the libraries
where they are installed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

VECTORS = Path(__file__).parents[1] / "tests/weights/weight_vectors.safetensors"
# the layouts of compressed-tensors, each with a scheme of its own
SCHEMES = {
    "W4A16": "pack-quantized", "W4A16_ASYM": "pack-quantized", "W8A16": "pack-quantized", "W8A8": "int-quantized",
    "FP8_DYNAMIC": "float-quantized", "FP8_BLOCK": "float-quantized", "MXFP8A16": "mxfp8-quantized",
    "MXFP4A16": "mxfp4-pack-quantized", "NVFP4A16": "nvfp4-pack-quantized",
}  # fmt: skip
# bits and group of `quantise_weight`'s formats that follow compressed-tensors, and whether they have zero points
RULES = {"w8": (8, 256, False), "int4": (4, 128, False), "int4, 32": (4, 32, False), "int4, zeros": (4, 32, True)}


def weight() -> Tensor:
    """Returns (24, 256) numbers: rows of very different sizes, groups of zeros and of one sign, an outlier, ties."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(24, 256, generator=generator) * torch.exp2(torch.arange(-12, 12) / 2)[:, None]
    w[3, :128] = 0
    w[4] = w[4].abs()
    w[5] = -w[5].abs()
    w[6, 7] = 1e4
    w[7] = torch.arange(256) / 16 - 8
    return w


def stored(w: Tensor) -> dict[str, Tensor]:
    """Returns the tensors of each scheme's layout, and the weight that the library reads back from them, in bf16."""
    import compressed_tensors.compressors  # noqa: F401 - fills the registry
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams
    from compressed_tensors.quantization.utils.helpers import generate_gparam

    w = w.bfloat16()
    found = {}
    for name, layout in SCHEMES.items():
        scheme = preset_name_to_scheme(name, targets=["Linear"])
        args = scheme.weights
        outer = generate_gparam(w.amin(), w.amax()) if args.strategy == "tensor_group" else None
        if args.strategy == "block":
            tiles = pad(w, (0, 0, 0, -w.shape[0] % 128)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
            low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
        else:
            groups = w.unflatten(1, (-1, args.group_size or w.shape[1]))
            low, high = groups.amin(-1), groups.amax(-1)
        scales, zeros = calculate_qparams(low, high, args, global_scale=outer)
        state = {"weight": w, "weight_scale": scales, "weight_global_scale": outer}
        state["weight_zero_point"] = None if args.symmetric else zeros
        compressor = BaseCompressor.get_value_from_registry(layout)
        tensors = compressor.compress({key: x for key, x in state.items() if x is not None}, scheme)
        found |= {f"{name}.{key}": x.contiguous() for key, x in tensors.items()}
        found[f"{name}.dequantised"] = compressor.decompress(tensors, scheme)["weight"].bfloat16()
    return found


def codes(w: Tensor) -> dict[str, Tensor]:
    """Returns codes that compressed-tensors computes in fp32 from scales in bf16."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    found = {}
    for name, (bits, group, zero_points) in RULES.items():
        args = QuantizationArgs(num_bits=bits, type="int", strategy="group", group_size=group, symmetric=not zero_points)
        groups = w.unflatten(1, (-1, group))
        low, high = groups.amin(-1), groups.amax(-1)
        scales, _ = calculate_qparams(low, high, args)
        scales = scales.bfloat16().float()
        # a group of zeros: any scale is correct, and ours is 1
        scales = scales.masked_fill((groups == 0).all(-1), 1.0)
        zeros = (-8 - low.clamp(max=0) / scales).round().clamp(-8, 7) if zero_points else torch.zeros_like(scales)
        found[f"{name}.codes"] = quantize(w, scales, zeros, args, dtype=torch.int8)
        found[f"{name}.scales"] = scales.bfloat16()
    return found


def normal() -> Tensor:
    """Returns (256, 4096) normal numbers in bf16."""
    return torch.randn(256, 4096, generator=torch.Generator().manual_seed(1)).bfloat16()


def apart(w: Tensor) -> dict[str, Tensor]:
    """Returns the share of codes of normal numbers in bf16 that differ where compressed-tensors divides in bf16 and in fp32."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    found, w = {}, normal()
    for name, bits, group in (("w8", 8, 4096), ("int4", 4, 128), ("int4, 32", 4, 32)):
        args = QuantizationArgs(num_bits=bits, type="int", strategy="group", group_size=group)
        groups = w.unflatten(1, (-1, group))
        scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        assert scales.dtype == torch.bfloat16
        narrow, wide = quantize(w, scales, zeros, args), quantize(w.float(), scales.float(), zeros.float(), args)
        found[f"{name}.apart"] = (narrow.float() != wide).float().mean()
    return found


def rows(w: Tensor) -> dict[str, Tensor]:
    """Returns torchao's codes and scales for rows: FP8, INT8, and INT8 codes for scales of 1/127 of the largest number."""
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    made = {
        "fp8": Float8Tensor.from_hp(w, granularity=PerRow()), "int8": Int8Tensor.from_hp(w, granularity=PerRow()),
        "int8, 127": Int8Tensor.from_hp(w, granularity=PerRow(), scale=w.abs().amax(1, keepdim=True) / 127),
    }  # fmt: skip
    codes = {f"{name}.codes": x.qdata.clone() for name, x in made.items()}
    return codes | {f"{name}.scales": x.scale.clone() for name, x in made.items()}


def main() -> None:
    w = weight()
    save_file({"weight": w} | stored(w) | codes(w) | apart(w) | rows(w), VECTORS)


if __name__ == "__main__":
    main()
