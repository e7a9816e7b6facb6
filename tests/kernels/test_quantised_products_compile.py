"""The kernels of quantised products compile without a GPU, on matrix units and within their registers and shared memory."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch

from tests.grids import swept

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.test_sampling_compiles import stack  # noqa: E402

SHARED = {80: 163 * 1024, 90: 227 * 1024}
MATRIX = {80: "mma.sync", 90: "wgmma"}
WORDS = {
    "scales_ptr": "*bf16", "codes_ptr": "*u8", "zeros_ptr": "*i8", "outer_ptr": "*fp32", "x_scales_ptr": "*fp32",
    "w_scales_ptr": "*fp32", "given_ptr": "*fp32", "M": "i32", "x_stride": "i32", "total": "i32",
}  # fmt: skip


def compiled(kernel: Any, sm: int, constants: dict[str, Any], **words: str):
    """A kernel as it is launched for aligned tensors."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(constants)
    names = kernel.arg_names
    options = {name: constants.pop(name) for name in ("num_warps", "enable_fp_fusion") if name in constants}
    signature = {name: "constexpr" if name in constants else words.get(name, WORDS.get(name, "*bf16")) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = [n for n, name in enumerate(names) if name.endswith("_ptr") or name == "x_stride"]
    source = ASTSource(kernel, signature, places, {(n,): [["tt.divisibility", 16]] for n in aligned})
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


@pytest.mark.parametrize(
    ("name", "M", "sm"),
    swept(
        product(("w8", "int4", "mxfp4", "mxfp8", "nvfp4"), (1, 64, 8192), (90, 80)),
        lambda case: (case[2] == 90 and case[:2], case[::2], case[1:]),
    ),
)
def test_weights_of_few_bits(name: str, M: int, sm: int) -> None:
    from rooftile.weights.triton import launch, weight_only
    from rooftile.weights.triton.unpacked import block_of, weight_of
    from tests.weights.cases import weight_of as some

    group = {"w8": 4096, "int4": 128, "nvfp4": 16}.get(name, 32)
    block_k = block_of(group, 4096, 64)
    parts = some(name, 16, 4096).parts
    weight = weight_of(parts, name, group, (4096, 4096), block_k)
    tile, warps = launch.tile_of(M, 4096, 4096, block_k, False, False)
    words = {"scales_ptr": "*u8" if name in ("mxfp4", "mxfp8", "nvfp4") else "*bf16"}
    if name == "w8":
        words["codes_ptr"] = "*i8"
    if tile.SPLITS > 1:
        words["o_ptr"] = "*fp32"
    built = compiled(weight_only._weight_only, sm, {"W": weight, "T": tile, "num_warps": warps}, **words)
    assert built.metadata.shared <= SHARED[sm]
    # tiles of fewer than 64 rows have no place on Hopper's larger units
    assert re.search(MATRIX[sm] if tile.BLOCK_M >= 64 else "mma.sync", built.asm["ptx"])
    if sm == 90:
        assert stack(built) <= 64, stack(built)


@pytest.mark.parametrize("M", [1, 64, 8192])
@pytest.mark.parametrize(("name", "sm"), [("fp8", 90), ("fp8_tile", 90), ("int8", 90), ("int8", 80)])
def test_codes_times_codes(name: str, sm: int, M: int) -> None:
    from rooftile.weights.triton import launch, scaled

    tile, warps = launch.tile_of(M, 4096, 4096, 128, False, False)
    constants = {"C": scaled.ScaledWeight(name, 4096, 4096, 128), "T": tile, "num_warps": warps}
    codes = "*i8" if name == "int8" else "*u8"
    words = {"x_ptr": codes, "codes_ptr": codes}
    if tile.SPLITS > 1:
        words["o_ptr"] = "*i32" if name == "int8" else "*fp32"
    built = compiled(scaled._scaled, sm, constants, **words)
    assert built.metadata.shared <= SHARED[sm]
    # Triton has FP8 on Hopper's larger units only; smaller tiles are multiplied exactly, in fp16
    numbers = "f16" if name != "int8" and tile.BLOCK_M < 64 else "e4m3" if name != "int8" else "s8"
    assert re.search(rf"(wgmma|mma\.sync)\S*{numbers}", built.asm["ptx"])
    if name == "fp8" and tile.BLOCK_M >= 64:
        # sums leave the matrix units: fp32 additions in the loop
        assert "add.f32" in built.asm["ptx"] or "add.rn.f32" in built.asm["ptx"]
    if sm == 90:
        assert stack(built) <= 64, stack(built)


@pytest.mark.parametrize("sm", [80, 90])
def test_what_comes_before_and_after(sm: int) -> None:
    from rooftile.numerics import row_kernels as rows
    from rooftile.weights.triton import scaled, unpacked
    from tests.weights.cases import weight_of as some

    adding = {"N": 4096, "SPLITS": 4, "SCALED": True, "BIAS": True, "BLOCK": 512, "num_warps": 4}
    assert stack(compiled(scaled._add_parts, sm, adding, parts_ptr="*fp32")) == 0
    weight = unpacked.weight_of(some("int4", 16, 4096).parts, "int4", 128, (4096, 4096), 128)
    assert stack(compiled(unpacked._dequantise, sm, {"BLOCK_N": 16, "W": weight, "num_warps": 4})) == 0
    for name in ("int8", *(["fp8", "fp8_tile"] * (sm >= 90))):
        constants = rows.constants_of(4096, name, False, torch.device("cpu"))
        codes = "*i8" if name == "int8" else "*fp8e4nv"
        built = compiled(rows._quantise_rows, sm, constants, codes_ptr=codes, scales_ptr="*fp32")
        assert stack(built) == 0
        assert "ld.global.v4.b32" in built.asm["ptx"]


def test_places_are_of_64_bits() -> None:
    from rooftile.weights.triton import launch, scaled

    tile, warps = launch.tile_of(8192, 4096, 4096, 128, False, False)
    constants = {"C": scaled.ScaledWeight("int8", 4096, 4096, 128), "T": tile, "num_warps": warps}
    built = compiled(scaled._scaled, 90, constants, x_ptr="*i8", codes_ptr="*i8")
    assert not re.search(r"arith\.muli .*tensor<128xi32>", built.asm["ttir"])
