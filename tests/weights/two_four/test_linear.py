"""The product with a 2:4 weight is that of the dense one with zeros; x and the bias have gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import rooftile as rt
from rooftile.errors import InvalidInput, Unsupported
from rooftile.numerics import quantise_rows
from rooftile.planning.timing import passes_for
from rooftile.runtime import devices
from rooftile.weights import dispatch
from rooftile.weights.linear import explain_linear
from rooftile.weights.two_four import TwoFour, compress, two_four
from rooftile.weights.two_four.product import cusparselt, masked, multiply_masked
from rooftile.weights.two_four.product import dispatch as backends
from tests.weights.two_four.test_masks import some

# torch.compile calls what torch deprecates
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
N, K = 48, 64


def weight_of(dtype: torch.dtype = torch.float32, transposable: bool = False) -> TwoFour:
    w = some(N, K).to(dtype)
    return compress(w, two_four(w, transposable))


def coded(format: str) -> tuple[TwoFour, rt.QuantisedWeight]:
    """A weight in FP8 or INT8 as 2:4, and as a dense one with zeros."""
    w = some(N, K)
    mask = two_four(w)
    dense = rt.quantise_weight(w * mask, format)
    return compress(dense.codes, mask, dense.scales), dense


@pytest.mark.parametrize("rows", [0, 1, 5, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_products(dtype: torch.dtype, rows: int) -> None:
    weight, x, bias = weight_of(dtype), torch.randn(rows, K).to(dtype), torch.randn(N)
    found = rt.linear(x, weight, bias)
    exact = x.double() @ weight.dense().double().T + bias.double()
    assert (found.dtype, found.shape) == (dtype, (rows, N))
    # summed in fp32 and rounded once
    size = x.double().abs() @ weight.dense().double().abs().T + bias.double().abs()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    allowed = torch.finfo(dtype).eps * exact.abs() + 16 * torch.finfo(wide).eps * size
    assert ((found.double() - exact).abs() <= allowed).all()


def test_strides_dtypes_and_leading_axes() -> None:
    weight, x = weight_of(torch.bfloat16), torch.randn(2, 3, 2 * K).bfloat16()[..., ::2]
    found = rt.linear(x, weight)
    assert torch.equal(found, rt.linear(x.contiguous(), weight))
    assert found.shape == (2, 3, N)
    assert rt.linear(x, weight, out_dtype=torch.float32).dtype == torch.float32
    assert rt.linear(x[0, 0], weight).shape == (N,)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rt.linear(x.float(), weight), found)


def test_a_row_alone_has_the_bits_that_it_has_among_others() -> None:
    weight, x = weight_of(), torch.randn(33, K)
    found = rt.linear(x, weight, deterministic=True)
    for n in (0, 17, 32):
        assert torch.equal(rt.linear(x[n : n + 1], weight, deterministic=True)[0], found[n])


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_codes_are_the_dense_product_of_codes_bit_for_bit(format: str) -> None:
    sparse, dense = coded(format)
    x, bias = torch.randn(7, K).bfloat16(), torch.randn(N)
    assert torch.equal(rt.linear(x, sparse, bias), rt.linear(x, dense, bias))
    rows = quantise_rows(x, format)
    assert torch.equal(rt.linear(rows, sparse), rt.linear(rows, dense))
    for fixed in (False, True):
        y = rt.linear(x.double(), sparse, bias, deterministic=fixed)
        # by its own words, in fp64
        due = rows.dequantise(torch.float64) @ dense.dequantise(torch.float64).T + bias.double()
        torch.testing.assert_close(y, due, rtol=1e-6, atol=1e-6)
    plain = compress(dense.codes, two_four(dense.codes.float()))
    ones = rt.QuantisedWeight(dense.codes, torch.ones(N, 1), None, None, format, K, (N, K))
    assert torch.equal(rt.linear(x, plain), rt.linear(x, ones))
    x[3, 5] = torch.nan
    lost = rt.linear(x, sparse, bias)
    assert lost[3].isnan().all()
    assert torch.equal(lost[:3], rt.linear(x[:3], dense, bias))


def test_sums_of_int8_are_exact() -> None:
    """Sums of 2^16 products have more bits than fp32, to which they are rounded once."""
    columns, generator = 1 << 17, torch.Generator().manual_seed(3)
    w = torch.randint(1, 128, (3, columns), dtype=torch.int8, generator=generator)
    weight = compress(w, two_four(torch.rand(3, columns, generator=generator)), torch.ones(3, 1))
    rows = quantise_rows(torch.randint(1, 128, (2, columns), generator=generator).float(), "int8")
    found = rt.linear(rows, weight, out_dtype=torch.float32)
    due = (rows.codes.long() @ weight.dense().long().T).float() * rows.scales
    assert torch.equal(found, due)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients(bias: bool) -> None:
    weight, x = weight_of(torch.float64), torch.randn(3, 5, K, dtype=torch.float64, requires_grad=True)
    b = torch.randn(N, dtype=torch.float64, requires_grad=True) if bias else None
    inputs = (x,) if b is None else (x, b)
    assert torch.autograd.gradcheck(lambda x, b=None: rt.linear(x, weight, b), inputs)
    assert torch.autograd.gradcheck(lambda x, b=None: rt.linear(x, weight, b), inputs, check_forward_ad=True)
    jacobian = torch.func.jacrev(lambda x: rt.linear(x, weight, None if b is None else b.detach()))(x.detach()[0, 0])
    assert torch.equal(jacobian, weight.dense())


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_gradients_of_codes_go_through_their_numbers(format: str) -> None:
    sparse, dense = coded(format)
    x = torch.randn(5, K, requires_grad=True)
    (found,) = torch.autograd.grad(rt.linear(x, sparse).square().sum(), x)
    (due,) = torch.autograd.grad(rt.linear(x, dense).square().sum(), x)
    assert torch.equal(found, due)


def test_transforms_and_compilation() -> None:
    weight, x = weight_of(), torch.randn(4, 5, K)
    due = rt.linear(x, weight)
    torch.testing.assert_close(torch.vmap(lambda x: rt.linear(x, weight))(x), due)

    def several(w: Tensor) -> Tensor:
        return rt.linear(x[0], compress(w, two_four(w)))

    ws = torch.stack([some(N, K, seed=n) for n in range(2)])
    torch.testing.assert_close(torch.vmap(several)(ws), torch.stack([several(w) for w in ws]))
    compiled = torch.compile(lambda x: rt.linear(x, weight), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), due)
    with torch.inference_mode():
        assert torch.equal(rt.linear(x, weight), due)
    assert rt.linear(torch.empty(3, K, device="meta"), weight.to("meta")).shape == (3, N)


def test_refusals() -> None:
    weight, x = weight_of(), torch.randn(2, K)
    for name in ("hopper", "triton", "library", "dense"):
        sentence = f"backend '{name}' cannot multiply this 2:4 weight\n  {name:8} - tensors are on cpu; needs a CUDA GPU"
        with pytest.raises(Unsupported, match=sentence):
            rt.linear(x, weight, backend=name)
    with pytest.raises(InvalidInput, match="backend is 'cuda'; must be one of hopper, triton, library, dense, definition"):
        rt.linear(x, weight, backend="cuda")
    with pytest.raises(InvalidInput, match=r"x is \(2, 32\) and the weight \(48, 64\)"):
        rt.linear(x[:, :32], weight)
    fp8, int8 = coded("fp8")[0], coded("int8")[0]
    for one, format in ((weight, "int8"), (fp8, "int8"), (int8, "fp8"), (fp8, "fp8_tile")):
        with pytest.raises(InvalidInput, match=rf"x is in {format} and the 2:4 weight in {one.dtype}; FP8 multiplies codes"):
            rt.linear(quantise_rows(x, format), one)
    assert "definition  runs" in explain_linear(x, weight)


@pytest.mark.parametrize("is_int8", [False, True])
def test_the_library_is_tried_in_each_kind_of_number(library: Library, monkeypatch: pytest.MonkeyPatch, is_int8: bool) -> None:
    monkeypatch.setattr(cusparselt, "_TRIED", {})
    assert cusparselt.lack_of_library(torch.device("cpu"), is_int8=is_int8) == ""
    assert library.packed == 1
    assert list(cusparselt._TRIED) == [(torch.device("cpu"), is_int8)]
    monkeypatch.setattr(torch, "_cslt_sparse_mm", lambda a, b, **options: torch.zeros(64, 64))
    monkeypatch.setattr(cusparselt, "_TRIED", {})
    assert cusparselt.lack_of_library(torch.device("cpu"), is_int8=is_int8).startswith("cuSPARSELt with wrong results; needs")


def test_kernels_of_ours_have_no_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    asked = backends.SparseProductCall(torch.empty(3, K), None, backends.Sparse(*weight_tensors(coded("int8")[0])), None,
                          backends.SparseProduct(N, K, torch.bfloat16, False))  # fmt: skip
    assert "values in int8; has bfloat16, float16, FP8" in list(backends._refusals_of_ours(asked, "triton"))


def test_shapes_that_cusparselt_refuses() -> None:
    assert not list(cusparselt.refusals_of_shape(torch.bfloat16, 4096, 14336))
    assert list(cusparselt.refusals_of_shape(torch.float32, 64, 64)) == ["values in float32; has bfloat16, float16, FP8, int8"]
    assert list(cusparselt.refusals_of_shape(torch.float8_e4m3fn, 48, 64)) == ["a weight 48 x 64; has multiples of 32"]
    # one probe, and one sentence where the library does not run
    reason = cusparselt.lack_of_library(torch.device("cpu"))
    assert reason.startswith("cuSPARSELt does not run here (")
    assert reason.endswith("); needs a PyTorch with cuSPARSELt for this chip")
    assert "\n" not in reason


class Library:
    """cuSPARSELt as its documentation says: the first matrix is 2:4, columns of the second come in eights or sixteens."""

    def __init__(self) -> None:
        self.packed = 0
        self.algorithms: list[int] = []

    def compress(self, w: Tensor) -> Tensor:
        assert w.is_contiguous()
        assert ((w.float().unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all()
        self.packed += 1
        return w.clone()

    def multiply(
        self, a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
        transpose_result: bool = False, alg_id: int = 0,
    ) -> Tensor:  # fmt: skip
        assert a.dtype == b.dtype
        assert b.T.is_contiguous()
        assert b.shape[1] % 16 == 0
        assert bias is None or bias.dtype == a.dtype
        assert out_dtype == {torch.float8_e4m3fn: torch.float32, torch.int8: torch.int32}.get(a.dtype)
        y = a.float() @ b.float() + (0 if bias is None else bias.float()[:, None])
        self.algorithms.append(alg_id)
        y = y.to(out_dtype or a.dtype)
        return y.T.contiguous() if transpose_result else y


FORMATS = {torch.bfloat16: None, torch.float16: None, torch.float8_e4m3fn: "fp8", torch.int8: "int8"}


@pytest.mark.parametrize(
    ("version", "capability", "number"), [(800, (9, 0), 17), (700, (9, 0), 0), (800, (8, 0), 0), (None, (9, 0), 0)]
)
def test_algorithms_are_those_of_the_version_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, version: int | None, capability: tuple[int, int], number: int
) -> None:
    """Numbers of another version are other algorithms."""
    cusparselt.algorithm_for.cache_clear()
    monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: version)
    monkeypatch.setitem(devices._KNOWN, torch.device("cuda", 0), "sm{}{}".format(*capability))
    assert cusparselt.algorithm_for(torch.device("cuda", 0), torch.bfloat16).number == number
    assert cusparselt.algorithm_for(torch.device("cpu"), torch.bfloat16) == cusparselt.DEFAULT
    cusparselt.algorithm_for.cache_clear()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(torch, "_cslt_compress", found.compress)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", found.multiply)
    return found


@pytest.mark.parametrize(
    ("format", "algorithm"),
    [
        *((format, cusparselt.DEFAULT) for format in (None, "fp8", "int8")),
        *((FORMATS[dtype], algorithm) for (_, _, dtype), algorithm in cusparselt.FASTEST.items()),
    ],
)
def test_the_librarys_product_by_its_documentation(
    library: Library, monkeypatch: pytest.MonkeyPatch, format: str | None, algorithm: cusparselt.Algorithm
) -> None:
    monkeypatch.setattr(cusparselt, "algorithm_for", lambda device, dtype: algorithm)
    weight = weight_of(torch.bfloat16) if format is None else coded(format)[0]
    parts, bias = backends.Sparse(*weight_tensors(weight)), torch.randn(N).bfloat16()
    product = backends.SparseProduct(N, K, torch.bfloat16, False)
    for rows in (65, 100, 128):
        x = torch.randn(rows, 2 * K).bfloat16()[:, ::2]
        given = None if format is None else quantise_rows(x, format)
        arguments = (x, None) if given is None else (given.codes, given.scales)
        found = cusparselt.multiply(*arguments, parts, bias, product)
        due = rt.linear(x, weight, bias, backend="definition")
        torch.testing.assert_close(found, due, rtol=2e-2, atol=2e-2)
        assert found.is_contiguous()
    assert set(library.algorithms) == {algorithm.number}
    # made once, and kept as long as the values live
    assert library.packed == 1


@pytest.mark.parametrize("transposable", [False, True])
def test_sparse_products_in_training_by_the_librarys_documentation(
    library: Library, monkeypatch: pytest.MonkeyPatch, transposable: bool
) -> None:
    monkeypatch.setattr(masked, "takes", lambda rows, w: True)
    w = some(N, K).bfloat16()
    w = w * two_four(w, transposable)
    x, dy = torch.randn(3, 25, K).bfloat16(), torch.randn(3, 25, N).bfloat16()
    dx, dw = masked.run_backward(dy, x, w, transposable, True, True)
    # the transposed weight is 2:4 only where its mask is
    assert library.packed == int(transposable)
    torch.testing.assert_close(dx.float(), dy.float() @ w.float(), rtol=2e-2, atol=0.2)
    torch.testing.assert_close(dw.float(), (dy.flatten(0, 1).T.float() @ x.flatten(0, 1).float()), rtol=2e-2, atol=0.2)


def test_nothing_is_tried_or_packed_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda:
        is_cuda = True

    monkeypatch.setattr(cusparselt, "is_capturing", lambda: True)
    monkeypatch.setattr(cusparselt, "_TRIED", {})
    device = torch.device("cuda", 0)
    for is_int8 in (False, True):
        reason = cusparselt.lack_of_library(device, is_int8=is_int8)
        assert reason.startswith("cuSPARSELt that was not tried before this CUDA graph; needs")
    assert not cusparselt._TRIED
    values = OnCuda()
    weight = backends.Sparse(values, None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(cusparselt, "_PACKED", {})
    assert cusparselt.lack_of_packed(weight).startswith("a weight that cuSPARSELt has not packed before this CUDA graph")
    monkeypatch.setattr(cusparselt, "_PACKED", {values: torch.empty(0)})
    assert cusparselt.lack_of_packed(weight) == ""


@pytest.mark.parametrize(
    ("rows", "first", "without_hopper"), [(64, "hopper", "triton"), (128, "hopper", "library"), (129, "library", "library")]
)
def test_few_rows_are_ours_and_many_the_librarys(rows: int, first: str, without_hopper: str) -> None:
    weight = weight_of(torch.bfloat16)
    product = backends.SparseProduct(N, K, torch.bfloat16, False)
    asked = backends.SparseProductCall(torch.empty(rows, K), None, backends.Sparse(*weight_tensors(weight)), None, product)
    assert backends.order(asked)[0] == first
    assert next(name for name in backends.order(asked) if name != "hopper") == without_hopper
    assert sorted(backends.order(asked)) == sorted(backends.NAMES)
    assert backends.order(asked._replace(product=product._replace(deterministic=True)))[:2] == ("hopper", "triton")


@pytest.mark.parametrize(("capability", "few"), [((8, 0), 64), ((9, 0), 128), ((10, 0), 64)])
def test_a_plan_and_a_launch_have_the_same_few_rows(
    capability: tuple[int, int], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(devices._KNOWN, torch.device("cuda", 0), "sm{}{}".format(*capability))
    device = torch.device("cuda", 0)
    assert backends.last_of_ours(device) == few
    weight = weight_of(torch.bfloat16)
    product = backends.SparseProduct(N, K, torch.bfloat16, False)
    for rows in (1, 64, 65, 128, 129, 500):
        asked = backends.SparseProductCall(torch.empty(rows, K), None, backends.Sparse(*weight_tensors(weight)), None, product)
        runs = [name for name in backends.order(asked) if name != "hopper" or capability == (9, 0)]
        assert (runs[0] in backends.OURS) == (rows <= few)
    # kernels of ours multiply densely, and the library at a higher rate
    item = SimpleNamespace(trains=False, takes_codes=False, products=((N, K),), dtype=torch.bfloat16)
    for rows in (few, few + 1):
        (one,) = passes_for(item, "2:4", rows, device)
        assert (one.flops == 2 * rows * N * K) == (rows <= few)


def test_hoppers_kernel_is_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    weight = compress(w := some(48, 128), two_four(w))
    product = backends.SparseProduct(48, 128, torch.float32, False)
    asked = backends.SparseProductCall(torch.empty(3, 128), None, backends.Sparse(*weight_tensors(weight)), None, product)
    assert list(backends._hopper_refusals(asked, (8, 9))) == ["compute capability 8.9; needs 9.0 (Hopper)"]
    assert not list(backends._hopper_refusals(asked, (9, 0)))
    monkeypatch.setattr(dispatch, "lack_of_gluon", lambda: "Triton 3.5.1; needs 3.6 or newer")
    assert list(backends._hopper_refusals(asked, (9, 0))) == ["Triton 3.5.1; needs 3.6 or newer"]


def weight_tensors(weight: TwoFour) -> tuple[Tensor, Tensor, Tensor | None]:
    return weight.values, weight.places, weight.scales


@pytest.mark.parametrize("transposable", [False, True])
def test_a_masked_weight_that_is_trained(transposable: bool) -> None:
    w = some(N, K, torch.float64)
    w = (w * two_four(w, transposable)).requires_grad_()
    x, bias = torch.randn(3, K, dtype=torch.float64, requires_grad=True), torch.randn(N, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *inputs: multiply_masked(*inputs, transposable=transposable), (x, w, bias))
    found = multiply_masked(x, w, bias, transposable=transposable)
    torch.testing.assert_close(found, functional.linear(x, w, bias))
    sparse = compress(w, two_four(w, transposable))
    # a prepared layer has the bits of the one that serves it
    served = TwoFour(sparse.values.float(), sparse.places, sparse.shape)
    assert torch.equal(multiply_masked(x.float(), w.float(), None, transposable=transposable), rt.linear(x.float(), served))
