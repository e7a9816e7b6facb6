"""Products with quantised weights on a GPU: every kernel by the rule of two, exact sums, places past 2^31, CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt
from rooftile import launch
from rooftile.matmul import backends, dequantise
from rooftile.numerics import kernels as row_kernels
from rooftile.numerics import quantise_rows
from rooftile.numerics.rows import rows_as_codes
from tests.matmul.cases import FORMATS, QUANTISES_X, assert_product, defined, ordered, weight_of

pytestmark = pytest.mark.gpu

# N x K: the projections of an 8B model with an eighth of their rows, and sizes that no tile divides
SIZES = [(768, 4096), (3584, 4096), (512, 14336), (77, 384), (4099, 1024)]
ROWS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 1024)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_dequantised_bits(name: str, N: int, K: int, dtype: torch.dtype) -> None:
    weight = weight_of(name, N, K, "cuda")
    assert torch.equal(dequantise(weight, dtype), weight.dequantise(dtype))


@pytest.mark.parametrize("way", ["triton", "library"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_products(name: str, N: int, K: int, way: str) -> None:
    weight, bias = weight_of(name, N, K, "cuda"), torch.randn(N, device="cuda").bfloat16()
    many = torch.randn(max(ROWS), K, device="cuda").bfloat16()
    for M in ROWS:
        x = many[:M]
        try:
            found = rt.linear(x, weight, bias, backend=way)
        except rt.Unsupported:
            assert way == "library"
            continue
        assert_product(found, x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_dtypes_and_strides(name: str, dtype: torch.dtype) -> None:
    weight = weight_of(name, 512, 1024, "cuda")
    x = torch.randn(3, 40, 1100, device="cuda").to(dtype)[:, ::2, :1024]
    for out_dtype in (None, torch.float32):
        found = rt.linear(x, weight, out_dtype=out_dtype, backend="triton")
        assert_product(found.flatten(0, 1).to(dtype), x.reshape(-1, 1024), weight)


@pytest.mark.parametrize("name", ["fp8", "fp8_tile"])
def test_long_rows_of_one_sign(name: str) -> None:
    """Sums of 13 bits would be off by more than 2^-10 of the sum of |x w|."""
    w = torch.rand(4096, 14336, device="cuda") + 0.1
    weight = rt.quantise_weight(w, name)
    for M in (1, 64, 256, 2048):
        x = (torch.rand(M, 14336, device="cuda") + 0.1).bfloat16()
        found = rt.linear(x, weight, out_dtype=torch.float32, backend="triton").double()
        exact = defined(x, weight, exact=True)
        assert ((found - exact).abs() <= 2.0**-10 * exact.abs()).all(), ((found - exact).abs() / exact.abs()).max()


@pytest.mark.parametrize("way", ["triton", "library"])
def test_int8_is_exact(way: str) -> None:
    weight, x = weight_of("int8", 1024, 14336, "cuda"), torch.randn(64, 14336, device="cuda")
    rows = quantise_rows(x, "int8")
    sums = (rows.codes.double() @ weight.codes.double().T).float()
    due = sums * rows.scales * weight.scales.T
    assert torch.equal(rt.linear(rows, weight, out_dtype=torch.float32, backend=way), due)


@pytest.mark.parametrize("name", QUANTISES_X)
@pytest.mark.parametrize("K", [128, 131, 4096, 14336, 65536])
def test_rows_are_quantised_as_defined(name: str, K: int) -> None:
    x = torch.randn(37, K, device="cuda") * torch.logspace(-40, 30, 37, device="cuda")[:, None]
    x[3, 5], x[4, K - 1], x[5] = torch.nan, torch.inf, 0.0
    for rows in (x, x.bfloat16(), x[:, ::2]):
        found, due = row_kernels.quantise(rows, name, None), rows_as_codes(rows, name)
        torch.testing.assert_close(found[1], due[1], rtol=0, atol=0, equal_nan=True)
        kept = rows.isfinite()
        assert torch.equal(found[0].float()[kept], due[0].float()[kept])


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_know_its_batch(name: str) -> None:
    weight, x = weight_of(name, 1024, 4096, "cuda"), torch.randn(256, 4096, device="cuda").bfloat16()
    together = rt.linear(x, weight, deterministic=True)
    for first, rows in ((0, 1), (255, 1), (100, 17), (0, 64)):
        some = slice(first, first + rows)
        assert torch.equal(rt.linear(x[some].clone(), weight, deterministic=True), together[some])


@pytest.mark.parametrize("name", FORMATS)
def test_nan_stays_in_its_row(name: str) -> None:
    weight, x = weight_of(name, 512, 1024, "cuda"), torch.randn(70, 1024, device="cuda").bfloat16()
    due = rt.linear(x, weight, backend="triton")
    x[33, 7] = torch.nan
    found = rt.linear(x, weight, backend="triton")
    assert found[33].isnan().all()
    kept = torch.arange(70, device="cuda") != 33
    assert torch.equal(found[kept], due[kept])


def test_columns_in_another_order() -> None:
    weight, x = ordered(weight_of("int4", 512, 1024, "cuda")), torch.randn(5, 1024, device="cuda").bfloat16()
    assert_product(rt.linear(x, weight, backend="triton"), x, weight)


@pytest.mark.parametrize("name", FORMATS)
def test_gradients(name: str) -> None:
    weight = weight_of(name, 512, 1024, "cuda")
    x = torch.randn(70, 1024, device="cuda", requires_grad=True)
    dy = torch.randn(70, 512, device="cuda")
    rt.linear(x, weight).backward(dy)
    torch.testing.assert_close(x.grad.double(), dy.double() @ weight.dequantise().double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("M", [1, 256])
def test_a_graph_says_the_same(name: str, M: int) -> None:
    weight, x = weight_of(name, 1024, 4096, "cuda"), torch.randn(M, 4096, device="cuda").bfloat16()
    with torch.inference_mode():
        rt.linear(x, weight, backend="triton")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = rt.linear(x, weight, backend="triton")
        for _ in range(2):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(y, rt.linear(x, weight, backend="triton"))


@pytest.mark.parametrize("name", ["w8", "int8", "int4"])
def test_places_past_2_to_the_31(name: str) -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB")
    N, K, M = 32768, 256, 66_000
    weight = weight_of(name, N, K, "cuda")
    x = torch.randn(M, K, device="cuda").bfloat16()
    found = rt.linear(x, weight, backend="triton")
    assert torch.equal(found[-2:], rt.linear(x[-2:].clone(), weight, backend="triton")) or name != "int8"
    assert_product(found[-2:], x[-2:], weight)


def test_kernels_run() -> None:
    """A call that names no backend runs kernels."""
    for name in FORMATS:
        weight = weight_of(name, 512, 1024, "cuda")
        for M in (1, 64, 4096):
            seen: list[str] = []
            with launch.observe(seen.append):
                rt.linear(torch.randn(M, 1024, device="cuda").bfloat16(), weight)
            assert seen or M > backends.MANY, (name, M)
