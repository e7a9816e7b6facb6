"""The kernel that rounds rows of activations compiles without a GPU and keeps its rows in registers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.test_quantised_products_compile import compiled
from tests.kernels.test_sampling_compiles import stack


@pytest.mark.parametrize("K", [2048, 14336])
@pytest.mark.parametrize("format", ["fp8", "fp8_tile", "int8"])
def test_it_compiles(format: str, K: int) -> None:
    from rooftile.numerics import row_kernels

    found = compiled(
        row_kernels._round_rows, 90, row_kernels.rounding_constants(K, format), x_ptr="*bf16", o_ptr="*bf16", x_stride="i32"
    )
    assert stack(found) == 0
    assert found.metadata.shared <= 99 * 1024
