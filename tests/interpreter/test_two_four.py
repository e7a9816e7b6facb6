"""Kernels of 2:4 weights, interpreted: masks, values and places bit for bit, and products of few rows by the definition."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt
from rooftile.numerics import quantise_rows
from rooftile.runtime import launch
from rooftile.weights.two_four import compress, definition, two_four
from rooftile.weights.two_four.product import few_rows
from tests.grids import swept
from tests.weights.two_four.test_masks import some

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "K"), [(8, 16), (12, 516), (4, 1028), (20, 36)])
def test_masks_values_and_places(N: int, K: int, dtype: torch.dtype) -> None:
    # every second row, so that rows are not next to each other
    w = some(2 * N, K, dtype)[::2]
    seen: list[str] = []
    with launch.observe(seen.append):
        mask, both = two_four(w), two_four(w, transposable=True)
        weight = compress(w, mask)
        dense = weight.dense()
    assert seen == ["_mask", "_transposable_mask", "_compress", "_dense"]
    assert torch.equal(mask, definition.row_mask(w))
    assert torch.equal(both, definition.transposable_mask(w))
    values, places = definition.compressed(w, mask)
    assert torch.equal(definition.bits_of(weight.values), definition.bits_of(values))
    assert torch.equal(weight.places, places)
    assert torch.equal(definition.bits_of(dense), definition.bits_of(definition.dense(values, places, K)))


@pytest.mark.parametrize("K", [36, 516])
def test_codes_of_int8_are_moved_bit_for_bit(K: int) -> None:
    w, mask = torch.randint(-128, 128, (12, K), dtype=torch.int8), two_four(some(12, K))
    seen: list[str] = []
    with launch.observe(seen.append):
        weight = compress(w, mask)
        dense = weight.dense()
    assert seen == ["_compress", "_dense"]
    values, places = definition.compressed(w, mask)
    assert torch.equal(weight.values, values)
    assert torch.equal(weight.places, places)
    assert torch.equal(dense, torch.where(mask, w, 0))
    with pytest.raises(rt.Unsupported, match="values in int8; has bfloat16, float16, FP8"):
        rt.linear(torch.randn(3, K), weight, backend="triton")


# sums of the largest numbers are infinite, as on a GPU
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_hostile_blocks() -> None:
    inf = float("inf")
    rows = [[inf, -inf, inf, 0.0], [-0.0, 0.0, 0.0, -0.0], [1e-45, 0.0, 2e-45, -1e-45], [3e38, -3e38, 3.2e38, 3.1e38]]
    w = torch.tensor(rows).repeat(1, 3)
    assert torch.equal(two_four(w), definition.row_mask(w))
    assert torch.equal(two_four(w, True), definition.transposable_mask(w))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_masks_of_other_numbers_are_refused(dtype: torch.dtype) -> None:
    w = some(8, 1028, dtype)
    mask = two_four(w)
    lost = w.float().index_put((torch.tensor(5), torch.tensor(1026)), torch.tensor(float("nan"))).to(dtype)
    for transposable in (False, True):
        with pytest.raises(rt.InvalidInput, match="weight is NaN at row 5, column 1026"):
            two_four(lost, transposable)
    mask[7, 1024:] = True
    with pytest.raises(rt.InvalidInput, match="mask keeps 4 of columns 1024 to 1027 in row 7; must keep two"):
        compress(w, mask)


SIZES = [(1, 70, 256), (17, 130, 516), (64, 33, 128), (70, 64, 1024), (3, 5, 36), (3, 20, 4300)]


# each size, and each dtype
@pytest.mark.parametrize(
    ("M", "N", "K", "dtype"),
    swept([(*size, dtype) for size in SIZES for dtype in (torch.bfloat16, torch.float16)], lambda case: (case[:3], case[3])),
    ids=str,
)
def test_products_of_few_rows(M: int, N: int, K: int, dtype: torch.dtype) -> None:
    w = some(N, K, dtype)
    weight = compress(w, two_four(w))
    x, bias = torch.randn(M, K + 8).to(dtype)[:, :K], torch.randn(N)
    # with K of 4,300 a program has several tiles, and the last of them ends past K
    assert K < 4300 or few_rows.tile_of(4, few_rows.SparseProduct(N, K, dtype, False), False, True).STEPS == 3
    exact = x.double() @ weight.dense().double().T + bias.double()
    due = rt.linear(x, weight, bias, backend="definition")
    for fixed in (False, True):
        found = rt.linear(x, weight, bias, backend="triton", deterministic=fixed)
        # twice the error of the definition, and a sum in fp32 in another order
        allowed = 2 * (due.double() - exact).abs() + torch.finfo(dtype).eps * exact.abs() + 1e-4
        assert ((found.double() - exact).abs() <= allowed).all()
    assert rt.linear(x, weight, backend="triton", out_dtype=torch.float32).dtype == torch.float32


def test_products_in_fp8() -> None:
    w = some(48, 384)
    mask = two_four(w)
    codes = rt.quantise_weight(w * mask, "fp8")
    weight = compress(codes.codes, mask, codes.scales)
    x, bias = torch.randn(5, 384).bfloat16(), torch.randn(48)
    due = rt.linear(quantise_rows(x, "fp8"), weight, bias, out_dtype=torch.float32, backend="definition")
    for given in (x, quantise_rows(x, "fp8")):
        found = rt.linear(given, weight, bias, out_dtype=torch.float32, backend="triton")
        torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-4)


def test_a_row_alone_has_the_bits_that_it_has_among_others() -> None:
    w = some(80, 512, torch.bfloat16)
    weight, x = compress(w, two_four(w)), torch.randn(70, 512).bfloat16()
    found = rt.linear(x, weight, backend="triton", deterministic=True)
    for n in (0, 33, 69):
        assert torch.equal(rt.linear(x[n : n + 1], weight, backend="triton", deterministic=True)[0], found[n])


def test_k_is_split_where_rows_of_the_weight_are_few() -> None:
    product = few_rows.SparseProduct(64, 1024, torch.bfloat16, False)
    tile = few_rows.tile_of(1, product, False, True)
    assert (tile.SPLITS, tile.STEPS, tile.BIAS) == (8, 1, False)
    whole = few_rows.tile_of(64, few_rows.SparseProduct(28672 * 4, 4096, torch.bfloat16, False), False, True)
    assert (whole.SPLITS, whole.BLOCK_K, whole.BIAS) == (1, 64, True)


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize(("M", "N"), [(1, 16), (70, 130), (128, 64)])
def test_results_are_transposed(M: int, N: int, is_scaled: bool) -> None:
    from rooftile.weights.two_four.product.transposed import transposed

    y = torch.randn(N, -(-M // 16) * 16)
    y = y if is_scaled else y.bfloat16()
    if not is_scaled:
        assert torch.equal(transposed(y, M, None, None, None, torch.bfloat16), y[:, :M].T)
        return
    x_scales, w_scales, bias = torch.rand(M, 1), torch.rand(N, 1), torch.randn(N)
    # sums of fp32, and of int8 in int32
    for sums in (y, (y * 1000).int()):
        due = sums[:, :M].T * x_scales * w_scales.T + bias
        assert torch.equal(transposed(sums, M, x_scales, w_scales, bias, torch.bfloat16), due.bfloat16())


@pytest.mark.parametrize(
    ("order", "shape", "places"),
    [
        ("nibbles", (4, 4, 2, 2, 2), (1, 3, 4, 0, 2)),
        ("bytes", (4, 8, 2, 2), (1, 3, 0, 2)),
        ("pairs", (4, 16, 2), (1, 0, 2)),
    ],
)
def test_rows_in_the_order_of_hoppers_threads(order: str, shape: tuple[int, ...], places: tuple[int, ...]) -> None:
    """Each 128 numbers of strided rows, the last of them zeros, in the dtype that is asked for."""
    from rooftile.weights.hopper.ordered import in_order

    x = torch.randn(3, 2 * 2180).bfloat16()[:, ::2]
    found = in_order(x, order, torch.float16)
    padded = torch.nn.functional.pad(x, (0, 124)).half().reshape(3, 18, *shape)
    due = padded.permute(0, 1, *(2 + n for n in places)).reshape(3, 2304)
    assert found.dtype == torch.float16
    assert torch.equal(found, due)
