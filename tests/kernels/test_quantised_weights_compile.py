"""The kernel that quantises weights compiles without a GPU, keeps its rows in registers, and rounds its quotients once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.weights.formats import group_of, weight_format
from tests.kernels.test_quantised_products_compile import compiled
from tests.kernels.test_sampling_compiles import stack

POINTERS = {
    "fp8": ("*fp8e4nv", "*fp32"), "int8": ("*i8", "*fp32"), "w8": ("*i8", "*bf16"), "int4": ("*u8", "*bf16"),
    "mxfp8": ("*fp8e4nv", "*u8"), "mxfp4": ("*u8", "*u8"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given"),
    [("fp8", None), ("int8", None), ("w8", None), ("int4", 32), ("int4", -1), ("mxfp8", None), ("mxfp4", None)],
)
@pytest.mark.parametrize("trained", [False, True])
def test_rows_of_14336(name: str, given: int | None, trained: bool) -> None:
    from rooftile.weights.triton import weights

    kind = weight_format(name)
    codes, scales = POINTERS[name]
    words = {"codes_ptr": codes, "scales_ptr": scales, "mask_ptr": "*i8", "inside_ptr": "*u8", "flag_ptr": "*i32"}
    words["stride"] = "i32"
    constants = weights.constants_of(kind, 14336, group_of(kind, 14336, given), trained, trained and name not in ("fp8", "int8"))
    found = compiled(weights._quantise_weight, 90, constants, **words)
    assert stack(found) == 0
    assert found.metadata.shared <= 99 * 1024
    assert "div.full" not in found.asm["ptx"]
    assert ("div.rn" in found.asm["ptx"]) == (not kind.has_exponents)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_powers_of_two_that_are_rounded_up(name: str) -> None:
    from rooftile.weights.triton import weights

    kind = weight_format(name)
    codes, scales = POINTERS[name]
    words = {"codes_ptr": codes, "scales_ptr": scales, "mask_ptr": "*i8", "inside_ptr": "*u8", "flag_ptr": "*i32"}
    words["stride"] = "i32"
    found = compiled(weights._quantise_weight, 90, weights.constants_of(kind, 14336, 32, scales="round_up"), **words)
    assert stack(found) == 0


@pytest.mark.parametrize("name", list(POINTERS))
def test_a_chip_before_ada_has_no_e4m3(name: str) -> None:
    """There the kernel is not asked for fp8 and mxfp8 (`_runs_kernel`), and for all others it is."""
    from triton.compiler import CompilationError

    from rooftile.weights.triton import weights

    kind = weight_format(name)
    codes, scales = POINTERS[name]
    words = {"codes_ptr": codes, "scales_ptr": scales, "mask_ptr": "*i8", "inside_ptr": "*u8", "flag_ptr": "*i32"}
    words["stride"] = "i32"
    constants = weights.constants_of(kind, 1024, group_of(kind, 1024, None))
    if kind.codes == torch.float8_e4m3fn:
        with pytest.raises(CompilationError, match="fp8e4nv not supported in this architecture"):
            compiled(weights._quantise_weight, 80, constants, **words)
    else:
        assert stack(compiled(weights._quantise_weight, 80, constants, **words)) == 0


@pytest.mark.parametrize("K", [14336, 100])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_gradients_inside(dtype: str, K: int) -> None:
    from rooftile.weights.triton import weights

    found = compiled(weights._keep_inside, 90, weights._keeping(K), dw_ptr=dtype, bits_ptr="*u8")
    assert stack(found) == 0
    # loads of 16 bytes, where rows begin at a multiple of them
    assert "ld.global.v4.b32" in found.asm["ptx"] or K == 100
