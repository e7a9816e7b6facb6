"""Hopper's products with quantised weights, without a GPU: refusals, launches, and the kernels' code run by Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.numerics import QuantisedRows, quantise_rows  # noqa: E402
from rooftile.numerics.activations import KINDS, gated_halves  # noqa: E402
from rooftile.weights import dispatch as backends  # noqa: E402
from rooftile.weights.definition import Product, exact_product  # noqa: E402
from rooftile.weights.hopper import codes, gated_codes, launch, many_rows, widened  # noqa: E402
from tests.kernels import emulated  # noqa: E402
from tests.weights.cases import FORMATS, QUANTISES_X, defined, weight_of  # noqa: E402


def asked(name: str, M: int, N: int = 512, K: int = 1024, dtype: torch.dtype = torch.bfloat16) -> backends.ProductCall:
    weight = weight_of(name, N, K)
    product = Product(weight.format, weight.group, N, K, dtype, False)
    return backends.ProductCall(torch.zeros(M, K, dtype=dtype), None, weight.parts, None, product)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_taken(name: str) -> None:
    assert not list(launch.refusals(asked(name, 16)))


def test_refusals_say_what_came_and_what_is_there() -> None:
    many = "2,049 rows; has up to 2,048, in INT8 more if N is a multiple of 16 and results have 16 bits"
    assert list(launch.refusals(asked("fp8", 2049))) == [many]
    assert not list(launch.refusals(asked("int8", 513)))
    assert list(launch.refusals(asked("int8", 2049, N=520))) == [many]
    assert list(launch.refusals(asked("int8", 2049, dtype=torch.float32))) == [many]
    assert not list(launch.refusals(asked("fp8", 2049)._replace(product=asked("fp8", 1).product._replace(deterministic=True))))
    assert next(launch.refusals(asked("fp8", 1, K=131))).startswith("K is 131; has multiples of 16")
    assert list(launch.refusals(asked("int8", 1, N=8))) == ["N is 8; has 16 and more"]
    assert "both in bfloat16" in next(launch.refusals(asked("int4", 1, dtype=torch.float16)))
    assert "both in bfloat16" in next(launch.refusals(asked("w8", 1, dtype=torch.float32)))
    assert list(launch.refusals(asked("mxfp4", 1, dtype=torch.float16))) == ["x in torch.float16; mxfp4 has bfloat16"]
    assert not list(launch.refusals(asked("nvfp4", 1, dtype=torch.float16)))
    for name in ("int4, 64", "w8"):
        few = asked(name, 1)
        few = few._replace(product=few.product._replace(group=16))
        # a thread has 32 neighbours, and one scale for them
        assert next(launch.refusals(few)).startswith("groups of 16 numbers; has 32, 64, multiples of 128")
    assert next(launch.refusals(asked("nvfp4", 1, dtype=torch.float32))).endswith("has bfloat16 and float16")


@pytest.mark.parametrize(("name", "M", "first"), [
    ("int8", 64, "hopper"), ("int8", 257, "hopper"), ("int8", 513, "hopper"), ("int8", 5000, "hopper"), ("fp8", 256, "hopper"),
    ("fp8", 257, "library"), ("int4", 2048, "hopper"), ("int4", 2049, "library"), ("fp8_tile", 513, "library"),
])  # fmt: skip
def test_which_backend_is_first(name: str, M: int, first: str) -> None:
    call = asked(name, M)
    assert backends.order(call)[0] == first
    assert sorted(backends.order(call)) == sorted(backends.NAMES)
    # on other chips PyTorch's products are first for many rows
    assert (backends.order(call)[1] == "library") == (backends.last_of_portable(name) < M and first == "hopper")


@pytest.mark.parametrize(("name", "way", "M", "is_slower"), [
    ("int4", "library", 256, True), ("int4", "hopper", 64, False), ("fp8", "library", 256, False), ("w8", "library", 2049, True),
    ("w8", "hopper", 257, True),
    ("fp8_tile", "triton", 256, True), ("fp8_tile", "hopper", 16, False), ("int8", "library", 600, False),
])  # fmt: skip
def test_what_is_slower_than_16_bits_says_so(name: str, way: str, M: int, is_slower: bool) -> None:
    said = backends._runs(way, asked(name, M))
    assert said.startswith("runs")
    assert ("a weight in 16 bits is faster for so many rows" in said) == is_slower


def test_other_devices_are_refused() -> None:
    assert "needs 9.0" in next(backends._hopper_refusals(asked("fp8", 1), (8, 9)))
    assert next(backends.refusals("hopper", asked("fp8", 1))).startswith("tensors are on cpu")


@pytest.mark.parametrize(
    ("name", "M", "fixed"),
    [("fp8", 3, False), ("int8", 1100, True), ("int4", 7, False), ("int4", 130, True), ("w8", 7, False), ("nvfp4", 513, True)],
)
def test_launches(name: str, M: int, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments stand in the kernels' order, and many rows are multiplied by so many at a time."""
    calls: list[Any] = []
    monkeypatch.setattr(launch, "Kernel", lambda kernel, describe: lambda *launched: calls.append((kernel, *launched)))
    monkeypatch.setattr(launch, "processors_of", lambda device: 132)
    monkeypatch.setattr(launch, "may_read_early", lambda: fixed)
    monkeypatch.setattr(launch.counters, "zeros", lambda count, device: torch.zeros(count, dtype=torch.int32))
    monkeypatch.setattr(launch, "in_order", lambda x, order: x.contiguous())
    launch._kernel_of_codes.cache_clear()
    launch._kernel_of_widened.cache_clear()
    weight, bias = weight_of(name, 768, 1024), torch.randn(768).bfloat16()
    product = Product(weight.format, weight.group, 768, 1024, torch.bfloat16, fixed)
    x, scales = torch.zeros(M, 1024, dtype=torch.bfloat16), torch.ones(M, 1)
    if name in QUANTISES_X:
        x = x.to(weight.codes.dtype)
    o = launch.multiply(x, scales if name in QUANTISES_X else None, weight.parts, bias, product)
    launch._kernel_of_codes.cache_clear()
    launch._kernel_of_widened.cache_clear()
    assert o.shape == (M, 768)
    assert [call[2][call[0].arg_names.index("M")] for call in calls] == [min(512, M - n) for n in range(0, M, 512)]
    for n, (kernel, grid, arguments, constants) in enumerate(calls):
        names = [name for name in kernel.arg_names if name not in constants]
        given = dict(zip(names, arguments, strict=True))
        assert set(constants) == {*kernel.arg_names} - set(names) | set(launch.LAUNCH)
        assert given["N"] == 768
        assert given["w_desc"].data_ptr() == weight.codes.data_ptr()
        if name == "nvfp4":
            assert given["outer_ptr"] is weight.outer
        assert given["bias_ptr"] is bias
        assert given["o_ptr"].data_ptr() == o[512 * n :].data_ptr()
        assert given["steps"] == 8
        assert given["early"] == fixed
        tile = constants["T"]
        assert given["tiles"] == -(-768 // tile.block_n)
        assert 1 <= grid[0] <= 132
        shared = given["tiles"] % grid[0] != 0
        assert (given["partials_ptr"].numel() > 1) == shared
        if shared:
            rows = -(-given["M"] // tile.block_m)
            assert given["counters_ptr"].numel() == rows * given["tiles"] * tile.blocks


@contextmanager
def emulation(monkeypatch: pytest.MonkeyPatch, processors: int) -> Iterator[None]:
    """Launches run in Python, on so many processors; all counters are zero before and after."""
    with monkeypatch.context() as patched:
        patched.setattr(launch, "Kernel", emulated.emulate(patched))
        # the kernels are those that the emulator has changed
        patched.setattr(launch, "product_of_codes", codes.product_of_codes)
        patched.setattr(launch, "product_of_widened", widened.product_of_widened)
        patched.setattr(launch, "product_of_gates", gated_codes.product_of_gates)
        patched.setattr(launch, "product_of_many_rows", many_rows.product_of_many_rows)
        patched.setattr(launch, "processors_of", lambda device: processors)
        # tiles are shared wherever they can be, as if that cost nothing
        chosen = launch._programs_of
        patched.setattr(launch, "_programs_of", lambda sizes, processors, sharing: chosen(sizes, processors, (0, 0)))
        patched.setattr(launch, "tile_of", launch.tile_of.__wrapped__)
        patched.setattr(launch, "_DTYPES", {dtype: dtype for dtype in launch._DTYPES})
        # in a graph the ring fills before x is there
        patched.setattr(launch, "may_read_early", lambda: processors == 11)
        count = torch.zeros(10_000, dtype=torch.int32)
        patched.setattr(launch.counters, "zeros", lambda count_, device: count[:count_])
        patched.setattr(
            launch, "in_order", lambda x, order: widened.in_order(x.reshape(-1, 128), order == "bytes").reshape(x.shape)
        )
        patched.setattr(launch, "_kernel_of_codes", launch._kernel_of_codes.__wrapped__)
        patched.setattr(launch, "_kernel_of_widened", launch._kernel_of_widened.__wrapped__)
        patched.setattr(launch, "_kernel_of_gates", launch._kernel_of_gates.__wrapped__)
        patched.setattr(launch, "_kernel_of_many_rows", launch._kernel_of_many_rows.__wrapped__)
        yield
    assert not count.any(), "counters are left at zero"


@pytest.mark.parametrize("fixed", [False, True], ids=["any-order", "fixed-order"])
@pytest.mark.parametrize("processors", [3, 11])
@pytest.mark.parametrize("M", [1, 13, 64, 70, 257])
@pytest.mark.parametrize("name", FORMATS)
def test_emulated_products(name: str, M: int, processors: int, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own code, run by Python, says what the definition says."""
    N, K = 301, 640
    if (M > 64) and processors == 3:
        pytest.skip("the same as few rows, and slow")
    weight, bias = weight_of(name, N, K), torch.randn(N).bfloat16()
    if name == "nvfp4" and fixed:
        # parts of one product have outer scales of their own
        weight = replace(weight, outer=weight.outer * torch.linspace(0.5, 2, N)[:, None])
    x = torch.randn(M, K).bfloat16()
    rows = quantise_rows(x, weight.format) if name in QUANTISES_X else None
    with emulation(monkeypatch, processors):
        product = Product(weight.format, weight.group, N, K, torch.float32, fixed)
        if rows is None:
            found = launch.multiply(x, None, weight.parts, bias, product)
        else:
            found = launch.multiply(rows.codes, rows.scales, weight.parts, bias, product)
    wide = QuantisedRows(rows.codes, rows.scales, rows.format, torch.float32) if rows else None
    due = defined(wide or x, weight, bias, exact=True)
    if name == "int8":
        due = (exact_product(rows.codes, weight.codes).float() * rows.scales * weight.scales.T + bias.float()).double()
    if name == "nvfp4":
        # the outer scale multiplies sums, so weights are not rounded
        due = x.double() @ weight.dequantise(torch.float64).T + bias.double()
    torch.testing.assert_close(found.double(), due, rtol=3e-6, atol=3e-6 * float(due.abs().max()))


@pytest.mark.parametrize(("M", "N", "K"), [(1025, 16, 16), (1300, 304, 640), (2100, 272, 144)])
@pytest.mark.parametrize("processors", [2, 11])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulated_products_of_many_rows(
    dtype: torch.dtype, M: int, N: int, K: int, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INT8: every tile is computed once, also those at the ends, and the sums are exact."""
    weight, bias, rows = weight_of("int8", N, K), torch.randn(N), quantise_rows(torch.randn(M, K), "int8")
    product = Product("int8", K, N, K, dtype, False)
    assert not list(launch.refusals(backends.ProductCall(rows.codes, rows.scales, weight.parts, bias, product)))
    with emulation(monkeypatch, processors):
        found = launch.multiply(rows.codes, rows.scales, weight.parts, bias, product)
    due = exact_product(rows.codes, weight.codes).float() * rows.scales * weight.scales.T + bias
    assert torch.equal(found, due.to(dtype))


@pytest.mark.parametrize("processors", [3, 11])
@pytest.mark.parametrize(("M", "activation"), [(1, "silu"), (13, "gelu"), (64, "gelu_pytorch_tanh"), (130, "relu")])
@pytest.mark.parametrize("name", ["w8", "int4, 32, zeros", "mxfp4", "nvfp4"])
def test_emulated_gates(name: str, M: int, activation: str, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both halves of a sum are added by one program, whoever finishes last, and each is rounded before it is gated."""
    F, K = 304, 640
    weight, bias = weight_of(name, 2 * F, K), torch.randn(2 * F).bfloat16()
    if name == "nvfp4":
        weight = replace(weight, outer=weight.outer * torch.linspace(0.5, 2, 2 * F)[:, None])
    x = torch.randn(M, K).bfloat16()
    with emulation(monkeypatch, processors):
        product = Product(weight.format, weight.group, 2 * F, K, torch.bfloat16, False)
        found = launch.multiply_gated(x, weight.parts, bias, KINDS[activation], product)
    w = weight.dequantise(torch.float64 if name == "nvfp4" else torch.bfloat16).double()
    due = gated_halves((x.double() @ w.T + bias.double()).bfloat16(), activation)
    # where a half falls between two numbers of bf16 it may be rounded to the other
    torch.testing.assert_close(found, due, rtol=2e-2, atol=2e-2)
    assert (found == due).float().mean() > 0.97


@pytest.mark.parametrize("processors", [3, 11])
@pytest.mark.parametrize(("M", "activation"), [(1, "silu"), (13, "gelu"), (64, "gelu_pytorch_tanh")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulated_gates_of_codes(
    dtype: torch.dtype, M: int, activation: str, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave in FP8 with the scale that is given, and rounded before as the kernels that do so one after the other round."""
    F, K = 304, 640
    weight, bias, scale = weight_of("fp8", 2 * F, K), torch.randn(2 * F).bfloat16(), torch.tensor([0.05])
    x = torch.randn(M, K).to(dtype)
    x[M // 2, 5] = torch.nan if M > 1 else 0.0
    rows = quantise_rows(x)
    product = Product("fp8", K, 2 * F, K, dtype, False)
    with emulation(monkeypatch, processors):
        found, scales = launch.multiply_gated_codes(
            rows.codes, rows.scales, weight.parts, bias, scale, KINDS[activation], product
        )  # fmt: skip
    assert torch.equal(scales, torch.full((M, 1), 0.05))
    y = defined(QuantisedRows(rows.codes, rows.scales, "fp8", dtype), weight, bias, exact=True).to(dtype)
    due = quantise_rows(gated_halves(y, activation), scale=scale).codes
    assert (found.float().isnan() == due.float().isnan()).all()
    assert found.float().isnan().any() == (M > 1)
    kept = ~due.float().isnan()
    # where a half falls between two numbers of 16 bits it may be rounded to the other, and its code to a neighbour
    torch.testing.assert_close(found.float()[kept], due.float()[kept], rtol=0.15, atol=0.05)
    assert (found.float() == due.float())[kept].float().mean() > 0.97
