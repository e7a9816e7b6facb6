"""The kernel that rounds rows of activations in one pass has the bits of codes that are taken and multiplied by their scales."""

from __future__ import annotations

import pytest
import torch

from rooftile.numerics.quantised_rows import ROW_FORMATS, QuantisedRows, rounded_rows, rows_as_codes
from rooftile.runtime import launch

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("K", [100, 256, 300])
@pytest.mark.parametrize("format", ROW_FORMATS)
def test_bits(format: str, K: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 9, K, generator=torch.Generator().manual_seed(K))
    x[0, 0], x[0, 1], x[0, 2] = 0.0, torch.finfo(dtype).max, 1e-3
    x[1, 3, 5], x[1, 4, 7] = torch.nan, -torch.inf
    x = torch.cat([x, x], -1).to(dtype)[..., :K]
    seen: list[str] = []
    with launch.observe(seen.append):
        found = rounded_rows(x, format)
    assert seen == ["_round_rows"]
    codes, scales = rows_as_codes(x.flatten(0, 1), format)
    due = QuantisedRows(codes, scales, format, dtype).dequantise().view(x.shape)
    assert found.dtype == dtype
    assert torch.equal(found.isnan(), due.isnan())
    assert torch.equal(found.nan_to_num(nan=0.0), due.nan_to_num(nan=0.0))


def test_no_rows_and_one() -> None:
    assert rounded_rows(torch.empty(0, 64), "int8").shape == (0, 64)
    x = torch.tensor([127.0, 63.6, -1.0])
    assert rounded_rows(x, "int8").tolist() == [127.0, 64.0, -1.0]
