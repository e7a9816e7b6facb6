"""Parts of quantised weights have the numbers of the whole, and a cut through a scale is one sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rooftile.errors import InvalidInput
from rooftile.weights import quantise_weight
from rooftile.weights.part import part_of
from rooftile.weights.two_four import compress, two_four

FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {}, "fp8_tile": {}, "int8": {}, "w8": {}, "int4": {"group": 32}, "int4, a row": {"group": -1}, "mxfp8": {},
    "mxfp4": {}, "nvfp4": {},
}  # fmt: skip
# a rank holds two heads of each of two parts
ROWS = (slice(128, 256), slice(384, 500))


def weight_in(name: str) -> Any:
    w = torch.randn(500, 640, generator=torch.Generator().manual_seed(2))
    return compress(w, two_four(w)) if name == "2:4" else quantise_weight(w, name.split(",")[0], **FORMATS[name])


def numbers(weight: Any) -> torch.Tensor:
    return weight.dense() if hasattr(weight, "dense") else weight.dequantise()


@pytest.mark.parametrize("name", [*FORMATS, "2:4"])
@pytest.mark.parametrize("columns", [slice(0, 640), slice(128, 384), slice(512, 640)])
def test_numbers_are_those_of_the_whole(name: str, columns: slice) -> None:
    weight = weight_in(name)
    part = part_of(weight, ROWS, columns)
    due = torch.cat([numbers(weight)[rows, columns] for rows in ROWS])
    assert part.shape == tuple(due.shape)
    assert torch.equal(numbers(part), due)
    # a part keeps no memory of the whole
    assert part.nbytes < weight.nbytes
    tensors = [x for x in (getattr(part, field, None) for field in ("codes", "scales", "values", "places")) if x is not None]
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in tensors)


def test_zero_points_and_an_outer_scale_for_each_row() -> None:
    int4 = weight_in("int4")
    int4 = replace(int4, zeros=torch.randint(-8, 8, int4.scales.shape, dtype=torch.int8))
    nvfp4 = weight_in("nvfp4")
    nvfp4 = replace(nvfp4, outer=torch.rand(500, 1))
    for weight in (int4, nvfp4):
        due = torch.cat([weight.dequantise()[rows, 64:192] for rows in ROWS])
        assert torch.equal(part_of(weight, ROWS, slice(64, 192)).dequantise(), due)


def test_columns_in_another_order_are_cut_along_rows_alone() -> None:
    weight = replace(weight_in("int4"), order=torch.randperm(640, dtype=torch.int32))
    due = torch.cat([weight.dequantise()[rows] for rows in ROWS])
    assert torch.equal(part_of(weight, ROWS, slice(0, 640)).dequantise(), due)
    with pytest.raises(InvalidInput, match=r"q has sorted columns \(act-order\), and is cut along them; give the model to fewer"):
        part_of(weight, ROWS, slice(0, 320), "q")


@pytest.mark.parametrize(
    ("name", "rows", "columns", "sentence"),
    [
        ("int4", slice(0, 128), slice(0, 336), "q is cut at columns 0 and 336, of which 32 lie together"),
        ("mxfp4", slice(0, 128), slice(16, 640), "q is cut at columns 16 and 640, of which 32 lie together"),
        ("fp8_tile", slice(0, 128), slice(0, 320), "q is cut at columns 0 and 320, of which 128 lie together"),
        ("fp8_tile", slice(64, 128), slice(0, 640), "q is cut at rows 64 to 128, of which 128 share a scale"),
        ("int4, a row", slice(0, 128), slice(0, 321), "q is cut at columns 0 and 321, of which 2 lie together"),
        ("2:4", slice(0, 128), slice(0, 324), "q is cut at columns 0 and 324, of which 8 lie together"),
    ],
)
def test_a_cut_through_what_lies_together_is_refused(name: str, rows: slice, columns: slice, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        part_of(weight_in(name), (rows,), columns, "q")
