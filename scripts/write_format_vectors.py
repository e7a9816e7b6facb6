"""Writes tests/unit/format_vectors.json: encodings of a few hundred numbers by other libraries, bit for bit.

    pip install torchao==0.18.0 compressed-tensors==0.20.0 neural-compressor-pt==3.10; python scripts/write_format_vectors.py

The tests hold `rooftile.numerics` against these vectors, and the vectors against the libraries where they are installed. MXINT8
comes from microxcaling, Microsoft's emulation of the standard: PyPI has no package of it, but neural-compressor carries it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

VECTORS = Path(__file__).parents[1] / "tests/unit/format_vectors.json"


def inputs() -> Tensor:
    """Returns (rows, 64) numbers: sizes far apart, zeros, ties, and the limits of the formats."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(8, 64, generator=generator) * torch.exp2(torch.arange(-40, 40, 10.0))[:, None]
    outlier = torch.randn(2, 64, generator=generator)
    outlier[:, 5] = torch.tensor([100.0, -1e4])
    steps = torch.arange(64.0)
    ends = torch.tensor([448.0, 57344.0, 6.0, 127.0, 3e38])[:, None] * torch.linspace(-1, 1, 64)
    return torch.cat([spread, outlier, torch.zeros(1, 64), steps[None] / 16, -steps[None] * 3.5, ends])


def by_torchao(x: Tensor) -> dict[str, dict[str, list[list[int]]]]:
    """Returns, per format, the codes of rows and the bits of their scales."""
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
    from torchao.prototype.mx_formats.kernels import unpack_uint4
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    from torchao.quantization import MappingType
    from torchao.quantization.quant_primitives import choose_qparams_affine, quantize_affine

    found = {}
    for rule, mode in (("floor", ScaleCalculationMode.FLOOR), ("round_up", ScaleCalculationMode.RCEIL)):
        for name, dtype in (
            ("mxfp8_e4m3", torch.float8_e4m3fn),
            ("mxfp8_e5m2", torch.float8_e5m2),
            ("mxfp6_e3m2", "fp6_e3m2"),
            ("mxfp6_e2m3", "fp6_e2m3"),
            ("mxfp4", torch.float4_e2m1fn_x2),
        ):
            scales, values = to_mx(x, dtype, 32, mode)
            codes = unpack_uint4(values.contiguous()) if name == "mxfp4" else values.view(torch.uint8)
            found[f"{name} {rule}"] = {"codes": codes.tolist(), "scales": scales.view(torch.uint8).tolist()}
    for name, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        rows = [to_fp8_saturated(row * tensor_to_scale(row, dtype), dtype) for row in x]
        found[name] = {"codes": torch.stack(rows).view(torch.uint8).tolist()}
    for name, largest in (("int8", 127), ("int4", 7)):
        block = (1, x.shape[1])
        scales, zeros = choose_qparams_affine(
            x, MappingType.SYMMETRIC, block, torch.int8, -largest, largest, eps=1e-30, scale_dtype=torch.float32
        )
        codes = quantize_affine(x, block, scales, zeros, torch.int8, -largest, largest)
        found[name] = {"codes": codes.tolist(), "scales": scales.view(torch.int32).tolist()}
    return found


def by_compressed_tensors(x: Tensor) -> dict[str, dict[str, list[list[int]]]]:
    """Returns codes, scales and factors of NVFP4, each row of x being a tensor of its own."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.quant_scheme import NVFP4A16
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    arguments, codes, scales, factors = NVFP4A16["weights"], [], [], []
    for row in x.unsqueeze(1):
        factor = generate_gparam(row.amin(), row.amax())
        groups = row.unflatten(-1, (-1, 16))
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments, factor)
        values = quantize(row, scale, None, arguments, global_scale=factor)
        packed = pack_fp4_to_uint8(values)
        codes.append(torch.stack((packed & 15, packed >> 4), -1).flatten().tolist())
        scales.append(scale.to(torch.float8_e4m3fn).view(torch.uint8).flatten().tolist())
        factors.append(factor.view(torch.int32).tolist())
    return {"nvfp4": {"codes": codes, "scales": scales, "factors": factors}}


def by_microxcaling(x: Tensor) -> dict[str, dict[str, list[list[int]]]]:
    """Returns the bits of numbers rounded to MXINT8, ties to even; it has no codes."""
    from neural_compressor.torch.algorithms.mx_quant.utils import quantize_mx_op

    numbers = quantize_mx_op(x, "int8", round="even", block_size=32, axes=[-1])
    return {"mxint8": {"numbers": numbers.view(torch.int32).tolist()}}


def main() -> None:
    x = inputs()
    formats = by_torchao(x) | by_compressed_tensors(x) | by_microxcaling(x)
    VECTORS.write_text(json.dumps({"inputs": x.view(torch.int32).tolist(), "formats": formats}) + "\n")


if __name__ == "__main__":
    main()
