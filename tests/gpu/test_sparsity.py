"""2:4 weights on a GPU: the bits of a CPU, products by the rule of two, and a training step by its formula."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import rooftile as rt
from rooftile.runtime import launch
from rooftile.weights.linear import explain_linear
from rooftile.weights.two_four import Recipe, TwoFour, compress, definition, two_four
from rooftile.weights.two_four.product import cusparselt, masked, multiply_masked
from rooftile.weights.two_four.product import dispatch as backends
from rooftile.weights.two_four.product.cusparselt import MULTIPLES
from tests.qat.test_sparse import data, small, step
from tests.weights.two_four.test_masks import DTYPES, some

pytestmark = pytest.mark.gpu

# N x K of an 8B model with an eighth of the rows, sizes of a tile's edge, multiples of cuSPARSELt's 16 and 32, and sizes that no
# tile divides
SIZES = [(768, 4096), (3584, 4096), (4096, 14336), (32, 32), (48, 80), (4128, 1056), (77, 384), (130, 516)]
ROWS = (1, 2, 16, 17, 63, 64, 65, 256, 1000)
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def weight_of(N: int, K: int, dtype: torch.dtype) -> TwoFour:
    """A 2:4 weight; in FP8 with scales."""
    w = some(N, K).cuda()
    mask = two_four(w)
    if dtype != torch.float8_e4m3fn:
        return compress(w.to(dtype), mask)
    codes = rt.quantise_weight(w * mask, "fp8")
    return compress(codes.codes, mask, codes.scales)


def exact(x: Tensor, weight: TwoFour, bias: Tensor) -> Tensor:
    """The product in fp64 of the same numbers; FP8 quantises x."""
    if weight.dtype == torch.float8_e4m3fn:
        x = rt.numerics.quantise_rows(x, "fp8").dequantise()
        return x.double() @ (weight.dense() if weight.scales is not None else weight.dense().float()).double().T + bias.double()
    return x.double() @ weight.dense().double().T + bias.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "K"), [(16, 64), (12, 516), (4096, 1028), (1024, 14336)])
def test_masks_values_and_places_are_those_of_a_cpu(N: int, K: int, dtype: torch.dtype) -> None:
    w = some(2 * N, K, dtype)[::2]
    there = w.cuda() if K != 516 else some(2 * N, K, dtype).cuda()[::2]
    for transposable in (False, True):
        mask = two_four(w, transposable)
        assert torch.equal(two_four(there, transposable).cpu(), mask)
        mine, due = compress(there, mask.cuda()), compress(w, mask)
        assert torch.equal(definition.bits_of(mine.values).cpu(), definition.bits_of(due.values))
        assert torch.equal(mine.places.cpu(), due.places)
        assert torch.equal(definition.bits_of(mine.dense()).cpu(), definition.bits_of(due.dense()))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("way", ["library", "dense", None])
@pytest.mark.parametrize(("N", "K"), [(768, 4096), (96, 160)])
def test_products_of_int8_are_those_of_a_cpu(N: int, K: int, way: str | None, rows: int) -> None:
    w = some(N, K)
    mask = two_four(w)
    codes = rt.quantise_weight(w * mask, "int8")
    weight = compress(codes.codes, mask, codes.scales)
    there = weight.to("cuda")
    assert torch.equal(there.dense().cpu(), weight.dense())
    if way == "library" and (reason := cusparselt.lack_of_library(there.device, is_int8=True)):
        pytest.skip(reason)
    x = torch.randn(rows, K).bfloat16()
    found = rt.linear(x.cuda(), there, out_dtype=torch.float32, backend=way)
    # sums are exact, and scales are multiplied in one order
    torch.testing.assert_close(found.cpu(), rt.linear(x, weight, out_dtype=torch.float32), rtol=1e-6, atol=0)


def test_hostile_blocks() -> None:
    inf = float("inf")
    rows = [[inf, -inf, inf, 0.0], [-0.0, 0.0, 0.0, -0.0], [1e-45, 0.0, 2e-45, -1e-45], [3e38, -3e38, 3.2e38, 3.1e38]]
    w = torch.tensor(rows).repeat(8, 16)
    for transposable in (False, True):
        assert torch.equal(two_four(w.cuda(), transposable).cpu(), two_four(w, transposable))
    with pytest.raises(rt.InvalidInput, match="weight is NaN at row 3, column 1"):
        two_four(w.index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(torch.nan)).cuda())


@pytest.mark.parametrize("way", ["hopper", "triton", "library", "dense"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_products(N: int, K: int, dtype: torch.dtype, way: str) -> None:
    weight, kind = weight_of(N, K, dtype), torch.float16 if dtype == torch.float16 else torch.bfloat16
    bias = torch.randn(N, device="cuda").to(kind)
    asked = backends.SparseProductCall(
        torch.empty(64, K, dtype=kind, device="cuda"), None, tensors_of(weight), bias, product_of(weight, kind)
    )
    reasons = list(backends.refusals(way, asked))
    if reasons:
        # shapes are refused everywhere; the library may be missing, and Hopper's kernel has whole steps of K
        assert way == "library" or (way == "hopper" and (not IS_HOPPER or K % 128))
        pytest.skip("; ".join(reasons))
    for rows in ROWS[:-1] if way == "hopper" else ROWS:
        x = torch.randn(rows, 2 * K, device="cuda").to(kind)[:, :K]
        found = rt.linear(x, weight, bias, backend=way)
        due, plain = exact(x, weight, bias), rt.linear(x, weight, bias, backend="definition")
        known = (plain.double() - due).norm()
        if way == "dense" and dtype != torch.float8_e4m3fn:
            # cuBLAS cuts long sums and adds the parts in 16 bits
            known = max(known, (functional.linear(x, weight.dense().to(kind), bias).double() - due).norm())
        error, allowed = (found.double() - due).norm(), 2 * known + 1e-5 * due.norm()
        assert error <= allowed, (rows, float(error), float(allowed))


@pytest.mark.parametrize("dtype", MULTIPLES, ids=str)
def test_an_algorithm_is_one_for_all_shapes(dtype: torch.dtype) -> None:
    """The library numbers its algorithms anew for each kind of product, and refuses a number that it does not have."""
    if reason := cusparselt.lack_of_library(torch.device("cuda", 0), is_int8=dtype == torch.int8):
        pytest.skip(reason)
    draw, unit = random.Random(0), MULTIPLES[dtype]
    format = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}.get(dtype)
    for _ in range(12):
        rows, N, K = draw.randint(65, 5000), unit * draw.randint(1, 200), unit * draw.randint(1, 200)
        w = torch.randn(N, K, device="cuda").to(torch.float16 if dtype == torch.float16 else torch.bfloat16)
        x, bias, mask = torch.randn(rows, K, device="cuda").to(w.dtype), torch.randn(N, device="cuda").to(w.dtype), two_four(w)
        weight = compress(w, mask)
        if format is not None:
            codes = rt.quantise_weight(w * mask, format)
            weight = compress(codes.codes, mask, codes.scales)
        found = rt.linear(x, weight, bias, backend="library")
        due = rt.linear(x, weight, bias, backend="definition")
        assert (found.double() - due.double()).norm() <= 0.005 * due.double().norm(), (rows, N, K)


def tensors_of(weight: TwoFour) -> backends.Sparse:
    return backends.Sparse(weight.values, weight.places, weight.scales)


def product_of(weight: TwoFour, out_dtype: torch.dtype) -> backends.SparseProduct:
    return backends.SparseProduct(*weight.shape, out_dtype, False)


def test_which_kernel_runs() -> None:
    weight = weight_of(768, 4096, torch.bfloat16)
    seen: list[str] = []
    with launch.observe(seen.append):
        rt.linear(torch.randn(64, 4096, device="cuda").bfloat16(), weight)
    assert ("product_of_two_four" if IS_HOPPER else "_few_rows") in seen
    many = torch.randn(129, 4096, device="cuda").bfloat16()
    lack = cusparselt.lack_of_library(many.device)
    assert ("library     runs" in explain_linear(many, weight)) == (not lack)
    if lack:
        assert lack.startswith("cuSPARSELt")
        with pytest.raises(rt.Unsupported, match="cuSPARSELt"):
            rt.linear(many, weight, backend="library")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("N", "K"), [(3584, 4096), (4096, 14336)])
def test_a_row_alone_has_the_bits_that_it_has_among_others(N: int, K: int, dtype: torch.dtype) -> None:
    weight, x = weight_of(N, K, dtype), torch.randn(300, K, device="cuda").bfloat16()
    found = rt.linear(x, weight, deterministic=True)
    # put in order before a product of many steps, and within one of few
    assert torch.equal(rt.linear(x[:20], weight, deterministic=True), found[:20])
    for n in (0, 63, 64, 299):
        assert torch.equal(rt.linear(x[n : n + 1], weight, deterministic=True)[0], found[n])


@pytest.mark.parametrize("rows", [8, 100, 200])
def test_a_captured_product(rows: int) -> None:
    weight, x = weight_of(768, 4096, torch.bfloat16), torch.randn(rows, 4096, device="cuda").bfloat16()
    due = rt.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rt.linear(x, weight)
    graph.replay()
    assert torch.equal(found, due)


def test_what_was_not_packed_before_a_graph_is_not_packed_in_it() -> None:
    weight, x = weight_of(768, 4096, torch.bfloat16), torch.randn(200, 4096, device="cuda").bfloat16()
    rt.linear(x, weight_of(768, 4096, torch.bfloat16))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rt.linear(x, weight)
    assert weight.values not in cusparselt._PACKED
    graph.replay()
    due = x.double() @ weight.dense().double().T
    assert (found.double() - due).norm() <= 0.01 * due.norm()


def test_places_beyond_2_to_the_31() -> None:
    # 2^31 numbers, and the last rows of them
    N, K = 1 << 18, 1 << 13
    w = torch.zeros(N, K, dtype=torch.bfloat16, device="cuda")
    w[-4:] = torch.randn(4, K, device="cuda").bfloat16()
    weight = compress(w, two_four(w))
    assert torch.equal(weight.dense()[-4:], w[-4:] * two_four(w[-4:]))
    assert torch.equal(two_four(w, True)[-4:], two_four(w[-4:], True))
    x = torch.randn(2, K, device="cuda").bfloat16()
    found = rt.linear(x, weight)[:, -4:]
    due = x.double() @ (w[-4:] * two_four(w[-4:])).double().T
    assert (found.double() - due).norm() <= 0.01 * due.norm()


@pytest.mark.parametrize("transposable", [False, True])
def test_sparse_products_of_a_weight_that_is_trained(transposable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # few rows take the products of many
    monkeypatch.setattr(masked, "PAYS", 65)
    w = some(512, 1024, torch.bfloat16).cuda()
    w = torch.where(two_four(w, transposable), w, 0).requires_grad_()
    x, bias = (torch.randn(*shape, device="cuda").bfloat16().requires_grad_() for shape in ((3, 129, 1024), (512,)))
    y = multiply_masked(x, w, bias, transposable=transposable)
    dy = torch.randn_like(y)
    y.backward(dy)
    wide = [one.detach().double().requires_grad_() for one in (x, w, bias)]
    due = functional.linear(*wide)
    due.backward(dy.double())
    for found, exactly in ((y, due), *((a.grad, b.grad) for a, b in zip((x, w, bias), wide, strict=True))):
        assert (found.double() - exactly).norm() <= 0.01 * exactly.norm()


# Dynamo of torch 2.11 reads an attribute of torch.autograd.Function that is deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("format", [None, "fp8", "int4:32"])
def test_training_goes_as_on_a_cpu(format: str | None, compiled: bool) -> None:
    models = [rt.qat.prepare(small(), format, sparsity=Recipe(decay=0.1)) for _ in range(2)]
    models[1].cuda()
    optimisers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    there = torch.compile(models[1]) if compiled else models[1]
    for n in range(3):
        due = step(models[0], optimisers[0], n)
        loss = there(data(seed=n).cuda()).square().mean()
        loss.backward()
        optimisers[1].step()
        optimisers[1].zero_grad()
        assert loss.item() == pytest.approx(due, rel=1e-3)
    if format is None:
        served, x = rt.qat.convert(copy.deepcopy(models[1])), data().cuda().bfloat16()
        # values in fp32 are multiplied in the dtype of x
        assert (served(x).float() - models[1](data().cuda())).norm() <= 0.05 * models[1](data().cuda()).norm()
