"""The kernel that quantises weights compiles without a GPU, keeps its rows in registers, and rounds its quotients once."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.matmul.formats import group_of, weight_format
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
def test_rows_of_14336(name: str, given: int | None) -> None:
    from rooftile.matmul.kernels import weights

    kind = weight_format(name)
    codes, scales = POINTERS[name]
    words = {"codes_ptr": codes, "scales_ptr": scales, "flag_ptr": "*i32", "stride": "i32"}
    found = compiled(weights._quantise_weight, 90, weights.constants_of(kind, 14336, group_of(kind, 14336, given)), **words)
    assert stack(found) == 0
    assert found.metadata.shared <= 99 * 1024
    assert "div.full" not in found.asm["ptx"]
    assert ("div.rn" in found.asm["ptx"]) == (not kind.has_exponents)
