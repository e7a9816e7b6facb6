"""The decoder's kernels, interpreted: what the plain operations do, rounded where they round."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from rooftile.fused import ACTIVATIONS, gated, linear
from rooftile.fused.kernels.norm import tile_of
from rooftile.fused.norm import add_norm, added_as_defined, normalise, normalised_as_defined
from rooftile.fused.quantised import gated_quantised
from rooftile.numerics import QuantisedRows, quantise_rows
from rooftile.numerics.activations import gated_halves
from rooftile.runtime.launch import observe
from tests.grids import pairs, swept
from tests.models.norms import KINDS, assert_within_an_ulp, norm_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# numpy says so where a GPU does not: exp of a gate far below zero is inf, and the gate then zero
OVERFLOWS = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("total", "size"), [(1, 40), (70, 40), (5, 41), (3, 896), (2, 2048), (1, 5000), (1, 1)])
def test_rows_are_normalised(total: int, size: int, kind: str, dtype: torch.dtype) -> None:
    norm = norm_of(kind, size, dtype)
    x = (3 * torch.randn(total, size) + 0.5).to(dtype)
    found = normalise(x, norm)
    assert_within_an_ulp(found, normalised_as_defined(x, norm))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("post", [None, *KINDS])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("total", "size"), [(1, 16384), (9, 40), (3, 896)])
def test_what_is_added_is_normalised(total: int, size: int, kind: str, post: str | None, dtype: torch.dtype) -> None:
    norm, first = norm_of(kind, size, dtype), None if post is None else norm_of(post, size, dtype, eps=0.3)
    x, residual = (2 * torch.randn(2, total, size)).to(dtype)
    _, due_stream = added_as_defined(x, residual, norm, first)
    found, stream = add_norm(x, residual, norm, first)
    if first is None:
        assert torch.equal(stream, due_stream)
    else:
        # an ulp of what is added may be many of a sum near zero
        added = normalised_as_defined(x, first).double().abs()
        assert_within_an_ulp(stream, due_stream, also=torch.finfo(dtype).eps * added)
        if dtype != torch.float32 and total * size > 1000:
            assert (stream != due_stream).float().mean() < 0.01
    assert_within_an_ulp(found, normalised_as_defined(stream, norm))
    # in place, and what was added is as it was
    assert stream.data_ptr() == residual.data_ptr()
    assert not x.isnan().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("total", "size"), [(9, 40), (2, 33_000)])
def test_a_stream_in_fp32_is_not_rounded(total: int, size: int, kind: str) -> None:
    """The second size is one row in pieces; what comes out has the dtype of what was added."""
    norm = norm_of(kind, size, torch.bfloat16)
    x, residual = 2 * torch.randn(total, size).bfloat16(), 2 * torch.randn(total, size)
    due, due_stream = added_as_defined(x, residual, norm)
    found, stream = add_norm(x, residual, norm)
    assert torch.equal(stream, due_stream)
    assert stream.data_ptr() == residual.data_ptr()
    assert not torch.equal(stream, stream.bfloat16().float())
    assert_within_an_ulp(found, due)


def test_a_residual_with_gaps_stays() -> None:
    norm = norm_of("rms", 40, torch.float32)
    x, wide = torch.randn(6, 40), torch.randn(6, 50)
    before = wide.clone()
    found, stream = add_norm(x, wide[:, :40], norm)
    assert torch.equal(wide, before)
    assert torch.equal(stream, before[:, :40] + x)
    assert_within_an_ulp(found, normalised_as_defined(stream, norm))


def assert_same_rows(found: QuantisedRows, due: QuantisedRows) -> None:
    """The same bits; NaN is as NaN."""
    assert (found.format, found.dtype, found.shape) == (due.format, due.dtype, due.shape)
    torch.testing.assert_close(found.codes.float(), due.codes.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found.scales, due.scales, rtol=0, atol=0, equal_nan=True)


# a format, and whether a scale is given: INT8 finds its scales
OUTS = (("fp8", False), ("fp8", True), ("int8", False))


@pytest.mark.parametrize(
    ("rows", "kind", "dtype", "way"), swept(product(((1, 40), (37, 41), (2, 2048)), KINDS, DTYPES, OUTS), pairs), ids=str
)
def test_rows_are_quantised_as_they_are_rounded(
    rows: tuple[int, int], kind: str, dtype: torch.dtype, way: tuple[str, bool]
) -> None:  # fmt: skip
    """One kernel gives the bits of two: that of the norm, and that of its rows."""
    (total, size), (out, given) = rows, way
    norm, scale = norm_of(kind, size, dtype), torch.tensor([0.01]) if given else None
    x, residual = (3 * torch.randn(2, total, size)).to(dtype)
    x[0, 3] = torch.nan
    seen: list[str] = []
    with observe(seen.append):
        found = normalise(x, norm, out, scale)
    # rows that are no whole accesses are written in the model's dtype first
    assert seen == ["_normalise"] + ["_quantise_rows"] * (size == 41)
    assert_same_rows(found, quantise_rows(normalise(x, norm), out, scale=scale))
    due, due_stream = add_norm(x, residual.clone(), norm, norm)
    found, stream = add_norm(x, residual, norm, norm, out, scale)
    assert_same_rows(found, quantise_rows(due, out, scale=scale))
    torch.testing.assert_close(stream, due_stream, rtol=0, atol=0, equal_nan=True)
    assert stream is residual


@OVERFLOWS
@pytest.mark.parametrize("out", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("total", "ffn"), [(1, 40), (5, 1027)])
def test_gates_are_quantised_as_they_are_rounded(total: int, ffn: int, activation: str, dtype: torch.dtype, out: str) -> None:
    x = (3 * torch.randn(total, 2 * ffn)).to(dtype)
    seen: list[str] = []
    with observe(seen.append):
        found = gated_quantised(x, activation, format=out)
    assert seen == ["_gate_quantised"]
    assert_same_rows(found, quantise_rows(gated(x, activation), out))
    if out == "fp8":
        scale = torch.tensor([0.02])
        assert_same_rows(
            gated_quantised(x, activation, format=out, scale=scale), quantise_rows(gated(x, activation), out, scale=scale)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("total", "heads", "size"), [(1, 4, 16), (37, 3, 24), (5, 1, 128), (3, 7, 80), (2, 40, 128)])
def test_heads_of_a_projection_are_normalised(total: int, heads: int, size: int, kind: str, dtype: torch.dtype) -> None:
    norm = norm_of(kind, size, dtype)
    qkv = torch.randn(total, 3 * heads * size).to(dtype).unflatten(-1, (3 * heads, size))
    for x in (*qkv.split(heads, dim=1), qkv.transpose(0, 1), qkv[:, ::2], qkv.flip(2).transpose(1, 2).mT):
        found = normalise(x, norm)
        assert found.is_contiguous()
        assert_within_an_ulp(found, normalised_as_defined(x, norm))


def test_columns_are_rows_too() -> None:
    norm = norm_of("layer", 40, torch.float32)
    x = torch.randn(40, 6).T
    assert_within_an_ulp(normalise(x, norm), normalised_as_defined(x, norm))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("total", "ffn"), [(1, 48), (33, 7), (3, 2048), (2, 4097)])
@OVERFLOWS
def test_gates(total: int, ffn: int, activation: str, dtype: torch.dtype) -> None:
    x = (4 * torch.randn(total, 2 * ffn)).to(dtype)
    found = gated(x, activation)
    # PyTorch loses the tails of gelu, where 1 + tanh and 1 + erf cancel: 1e-6 of what the gate lets through, at most
    tail = 1e-6 * x.chunk(2, dim=-1)[1].double().abs() if activation.startswith("gelu") else None
    assert_within_an_ulp(found, gated_halves(x, activation), of=2.0, also=tail)
    with_gaps = torch.cat((x, x), dim=1)[:, : 2 * ffn]
    assert torch.equal(gated(with_gaps, activation), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@OVERFLOWS
def test_gates_far_away(activation: str, dtype: torch.dtype) -> None:
    """An activation is its asymptote there, and nothing is NaN that need not be."""
    far = torch.tensor([0.0, 30.0, 1e3, 1e10, 1e20, 1e38, -30.0, -100.0, -1e3, -1e10, -1e20, -1e38, float("nan")])
    x = torch.stack((far, torch.full_like(far, 0.5))).to(dtype).reshape(1, -1)
    found = gated(x, activation)
    torch.testing.assert_close(found, gated_halves(x, activation), rtol=1e-6, atol=1e-11, equal_nan=True)
    assert found[0, :-1].isfinite().all()
    assert found[0, -1].isnan()


@OVERFLOWS
def test_the_tail_of_gelu_is_not_lost() -> None:
    """1 + tanh z is 0 in fp32 from z = -9 on, and gelu is not."""
    gate = torch.linspace(-7, -0.1, 100)
    found = gated(torch.cat((gate, torch.ones(100)))[None], "gelu_pytorch_tanh")[0]
    z = (2 / torch.pi) ** 0.5 * (gate.double() + 0.044715 * gate.double() ** 3)
    torch.testing.assert_close(found.double(), gate.double() * torch.sigmoid(2 * z), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-20, 1e-4, 1e4, 1e15])
def test_rows_of_any_size_of_numbers(scale: float, kind: str, dtype: torch.dtype) -> None:
    """A thousandth of them a thousand times as large as the others, as in the streams of large models."""
    norm = norm_of(kind, 4096, dtype)
    x, residual = torch.randn(2, 2, 4096) * scale
    residual[:, ::1000] *= 1000
    x, residual = x.to(dtype), residual.to(dtype)
    due, due_stream = added_as_defined(x, residual, norm)
    found, stream = add_norm(x, residual, norm)
    assert torch.equal(stream, due_stream)
    assert_within_an_ulp(found, due)


@pytest.mark.parametrize("size", [40, 896])
def test_a_row_does_not_know_its_neighbours(size: int) -> None:
    norm = norm_of("rms", size, torch.bfloat16)
    x, residual = torch.randn(2, 70, size).bfloat16()
    together, stream = add_norm(x, residual.clone(), norm)
    gates = gated(x, "silu")
    weight, bias = torch.randn(97, size).bfloat16(), torch.randn(97).bfloat16()
    products = linear(x, weight, bias)
    for row in (0, 33, 69):
        one = slice(row, row + 1)
        assert torch.equal(add_norm(x[one], residual[one].clone(), norm)[0], together[one])
        assert torch.equal(normalise(stream[one], norm), together[one])
        assert torch.equal(gated(x[one], "silu"), gates[one])
        assert torch.equal(linear(x[one], weight, bias), products[one])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("total", "inner", "out", "bias"),
    [(1, 40, 97, True), (70, 129, 33, False), (600, 8, 70, True), (1, 16, 8200, False)],
)
def test_products(total: int, inner: int, out: int, bias: bool, dtype: torch.dtype) -> None:
    """More tiles of rows than one group has, and tiles that are not full; what is read has gaps."""
    x, weight = torch.randn(total, 2 * inner).to(dtype)[:, ::2], torch.randn(out, inner).to(dtype)
    added = torch.randn(out).to(dtype) if bias else None
    exact = x.double() @ weight.double().T + (0 if added is None else added.double())
    found = linear(x, weight, added)
    assert found.dtype == dtype
    assert found.is_contiguous()
    eps = torch.finfo(dtype).eps
    assert ((found.double() - exact).abs() <= eps * exact.abs() + 1e-6 * inner).all()


def test_no_rows() -> None:
    norm = norm_of("rms", 8, torch.float32)
    none = torch.empty(0, 8)
    assert normalise(none, norm).shape == (0, 8)
    assert normalise(torch.empty(0, 3, 8), norm).shape == (0, 3, 8)
    assert [x.shape for x in add_norm(none, none, norm)] == [(0, 8), (0, 8)]
    assert gated(none, "silu").shape == (0, 4)
    assert linear(none, torch.randn(3, 8)).shape == (0, 3)


def test_tiles_hold_their_rows_and_follow_from_their_size() -> None:
    for size in (1, 40, 64, 128, 896, 2048, 4096, 5000, 16384):
        tile = tile_of(size)
        assert tile["BLOCK_N"] >= size
        assert 1 <= tile["num_warps"] <= 16
        assert tile["BLOCK_R"] * tile["BLOCK_N"] >= 2048
    assert tile_of(4096) == {"BLOCK_R": 1, "BLOCK_N": 4096, "num_warps": 8}
    assert tile_of(128) == {"BLOCK_R": 16, "BLOCK_N": 128, "num_warps": 4}
