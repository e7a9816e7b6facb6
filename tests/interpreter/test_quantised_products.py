"""Kernels of quantised products, interpreted: the bits of weights and codes, and products by the definition."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt
from rooftile.numerics import QuantisedRows, quantise_rows, row_kernels
from rooftile.numerics.quantised_rows import rows_as_codes
from rooftile.runtime import launch
from rooftile.weights import dequantise
from rooftile.weights.triton import launch as tiles
from tests.weights.cases import FORMATS, QUANTISES_X, assert_product, ordered, weight_of

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp8_tile"])
def test_dequantised_bits(name: str, dtype: torch.dtype) -> None:
    for N, K in ((17, 256), (3, 128)):
        weight = weight_of(name, N, K)
        seen: list[str] = []
        with launch.observe(seen.append):
            found = dequantise(weight, dtype)
        assert seen == ["_dequantise"]
        assert torch.equal(found, weight.dequantise(dtype))


def test_the_smallest_and_largest_powers_of_two() -> None:
    w = torch.randn(4, 64) * torch.tensor([1e-38, 1e38, 1.0, 0.0])[:, None]
    for name in ("mxfp8", "mxfp4"):
        weight = rt.quantise_weight(w, name)
        assert torch.equal(dequantise(weight, torch.float32), weight.dequantise())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("M", [1, 3, 17, 70])
def test_products(name: str, M: int) -> None:
    weight = weight_of(name, 70, 256 if M < 70 else 384)
    x, bias = torch.randn(M, weight.shape[1]).bfloat16(), torch.randn(70)
    found = rt.linear(x, weight, bias, backend="triton")
    assert_product(found, x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_other_dtypes_strides_and_sizes(name: str, dtype: torch.dtype) -> None:
    weight = weight_of(name, 33, 384)
    wide = torch.randn(2, 9, 400).to(dtype)[:, ::2, :384]
    found = rt.linear(wide, weight, backend="triton")
    assert found.shape == (2, 5, 33)
    assert_product(found.flatten(0, 1), wide.reshape(-1, 384), weight)


@pytest.mark.parametrize("N", [70, 1024])
@pytest.mark.parametrize("splits", [1, 3])
def test_sums_get_their_scales(N: int, splits: int) -> None:
    sums = torch.randint(-(2**20), 2**20, (splits, 5, N), dtype=torch.int32)
    x_scales, w_scales, bias = torch.rand(5, 1), torch.rand(1, N), torch.randn(N)
    due = (sums.sum(0).float() * x_scales * w_scales + bias).bfloat16()
    assert torch.equal(tiles.added(sums, x_scales, w_scales, bias, torch.bfloat16), due)


@pytest.mark.parametrize("name", ["w8", "fp8", "int8", "fp8_tile"])
def test_rows_of_an_odd_length(name: str) -> None:
    weight, x = weight_of(name, 19, 131), torch.randn(5, 131).bfloat16()
    assert_product(rt.linear(x, weight, backend="triton"), x, weight)


def test_one_group_per_row_of_an_odd_length() -> None:
    weight = rt.quantise_weight(torch.randn(19, 131), "int4", group=131, zero_points=True)
    x = torch.randn(5, 131).bfloat16()
    assert torch.equal(dequantise(weight, torch.bfloat16), weight.dequantise(torch.bfloat16))
    assert_product(rt.linear(x, weight, backend="triton"), x, weight)


def test_columns_in_another_order() -> None:
    weight, x = ordered(weight_of("int4, 32, zeros", 40, 256)), torch.randn(5, 256).bfloat16()
    assert torch.equal(dequantise(weight, torch.bfloat16), weight.dequantise(torch.bfloat16))
    assert_product(rt.linear(x, weight, backend="triton"), x, weight)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_know_its_neighbours(name: str) -> None:
    weight, x = weight_of(name, 70, 512), torch.randn(40, 512).bfloat16()
    together = rt.linear(x, weight, deterministic=True, backend="triton")
    for n in (0, 17, 39):
        assert torch.equal(rt.linear(x[n : n + 1], weight, deterministic=True, backend="triton"), together[n : n + 1])


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_the_weight_that_are_not_split(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many columns a program has a whole sum, and finishes it itself."""
    monkeypatch.setattr(tiles, "PROGRAMS", 1)
    tiles.tile_of.cache_clear()
    weight, x, bias = weight_of(name, 33, 384), torch.randn(5, 384).bfloat16(), torch.randn(33)
    seen: list[str] = []
    with launch.observe(seen.append):
        found = rt.linear(x, weight, bias, backend="triton")
    tiles.tile_of.cache_clear()
    assert "_add_parts" not in seen
    assert_product(found, x, weight, bias)


def test_the_order_of_sums_follows_from_the_weight() -> None:
    found = {tiles.tile_of(M, 4096, 4096, 64, False, True) for M in (1, 16, 256, 8192)}
    assert len(found) == 1
    for M in (1, 16, 256, 8192):
        tile, _ = tiles.tile_of(M, 4096, 4096, 64, False, False)
        assert (tile.SPLITS - 1) * tile.STEPS * 64 < 4096 <= tile.SPLITS * tile.STEPS * 64


@pytest.mark.parametrize("name", QUANTISES_X)
def test_rows_are_quantised_as_defined(name: str) -> None:
    x = torch.randn(7, 300) * torch.tensor([1e-30, 1.0, 1e4, 0.0, 1e-42, 3e38, 1.0])[:, None]
    x[1, 3], x[6, 299] = torch.nan, torch.inf
    for rows in (x, x[:, ::2], x[:3].bfloat16()):
        found, due = row_kernels.quantise(rows, name, None), rows_as_codes(rows, name)
        assert torch.equal(found[1].isnan(), due[1].isnan())
        assert torch.equal(found[1].nan_to_num(), due[1].nan_to_num())
        kept = ~rows.isfinite().logical_not()
        assert torch.equal(found[0].float()[kept], due[0].float()[kept])
        assert torch.equal(found[0].float().isnan(), due[0].float().isnan())


def test_one_given_scale_saturates() -> None:
    x, scale = torch.randn(4, 200) * 100, torch.tensor(0.05)
    found, due = row_kernels.quantise(x, "fp8", scale), rows_as_codes(x, "fp8", scale)
    assert torch.equal(found[0].float(), due[0].float())
    assert found[0].float().abs().max() == 448


@pytest.mark.parametrize("name", QUANTISES_X)
def test_rows_that_are_quantised_already(name: str) -> None:
    weight, rows = weight_of(name, 33, 384), quantise_rows(torch.randn(5, 384).bfloat16(), name)
    assert isinstance(rows, QuantisedRows)
    assert_product(rt.linear(rows, weight, backend="triton"), rows, weight)


@pytest.mark.parametrize("name", FORMATS)
def test_nan_stays_in_its_row(name: str) -> None:
    weight, x = weight_of(name, 33, 384), torch.randn(5, 384).bfloat16()
    due = rt.linear(x, weight, backend="triton")
    x[2, 7] = torch.nan
    found = rt.linear(x, weight, backend="triton")
    assert found[2].isnan().all()
    for n in (0, 1, 3, 4):
        assert torch.equal(found[n], due[n])


def test_no_rows() -> None:
    for name in FORMATS:
        assert rt.linear(torch.randn(0, 256), weight_of(name, 33, 256), backend="triton").shape == (0, 33)
