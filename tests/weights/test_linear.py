"""`rt.linear`: exact products, gradients, and all that watches a call, on a CPU or with --device cuda."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap

import rooftile as rt
from rooftile.numerics import quantise_rows
from rooftile.numerics.activations import ACTIVATIONS, gated_halves
from rooftile.runtime import devices
from rooftile.weights import definition, multiply_gated, multiply_gated_rows
from rooftile.weights import dispatch as backends
from rooftile.weights.gated import takes, takes_rows
from tests.conformance.watching import watching
from tests.weights.cases import FORMATS, QUANTISES_X, assert_product, defined, ordered, weight_of

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
ROWS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 1024)


@pytest.mark.parametrize("name", FORMATS)
def test_rows(name: str, device: torch.device) -> None:
    weight, bias = weight_of(name, 77, 384, device), torch.randn(77, device=device)
    x = torch.randn(max(ROWS), 384, device=device).bfloat16()
    for M in ROWS:
        assert_product(rt.linear(x[:M], weight, bias), x[:M], weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_dtypes_and_leading_axes(name: str, dtype: torch.dtype, device: torch.device) -> None:
    weight = weight_of(name, 33, 256, device)
    x = torch.randn(2, 3, 512, device=device).to(dtype)[..., ::2]
    found = rt.linear(x, weight)
    assert found.shape == (2, 3, 33)
    assert_product(found.flatten(0, 1), x.reshape(-1, 256), weight)
    assert rt.linear(x[0, 0], weight).shape == (33,)
    assert rt.linear(x, weight, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_cut_into_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_of(name, 300, 256), torch.randn(5, 256)
    due = rt.linear(x, weight)
    monkeypatch.setattr(definition, "AT_ONCE", 1)
    torch.testing.assert_close(rt.linear(x, weight), due)


def test_int8_is_exact() -> None:
    """Long rows of one sign, whose sums pass 2^24, where fp32 has no odd numbers."""
    w = (torch.rand(9, 14336) + 0.5).float()
    weight, x = rt.quantise_weight(w, "int8"), torch.rand(4, 14336) + 0.5
    rows = quantise_rows(x, "int8")
    sums = rows.codes.long() @ weight.codes.long().T
    assert sums.max() > 2**24
    for product in (definition.exact_product, definition.in_exact_sums):
        assert torch.equal(product(rows.codes, weight.codes).long(), sums)
    due = sums.double() * rows.scales.double() * weight.scales.double().T
    assert torch.equal(rt.linear(x.double(), weight), due)


@pytest.mark.parametrize("has_units", [False, True])
def test_int8_products_of_a_cpu_have_the_same_bits(has_units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with instructions for them uses these: on numbers that would saturate in 16 bits, of any shape and stride."""
    if has_units and not definition.has_int8_units():
        pytest.skip("this CPU has no VNNI")
    monkeypatch.setattr(definition, "has_int8_units", lambda: has_units)
    for M, N, K in ((1, 1, 1), (1, 1024, 1024), (16, 1024, 1024), (256, 77, 1023), (5, 33, 14336), (17, 64, 63), (3, 16, 2048)):
        x, w = (torch.randint(-128, 128, shape).to(torch.int8) for shape in ((M, K), (N, K)))
        x[0], w[0] = 127, -128
        w[-1] = 127
        for codes, weights in ((x, w), (x.T.contiguous().T, w.T.contiguous().T)):
            found = definition.exact_product(codes, weights)
            assert found.dtype == torch.int32
            assert torch.equal(found.double(), x.double() @ w.double().T)
    weight, x = rt.quantise_weight(torch.randn(77, 384), "int8"), torch.randn(5, 384)
    rows = quantise_rows(x, "int8")
    sums = (rows.codes.long() @ weight.codes.long().T).float()
    assert torch.equal(rt.linear(x, weight), sums * rows.scales * weight.scales.T)


def test_long_rows_of_one_sign(device: torch.device) -> None:
    w, x = torch.rand(64, 14336, device=device) + 0.1, (torch.rand(5, 14336, device=device) + 0.1).bfloat16()
    for name in ("fp8", "fp8_tile"):
        weight = rt.quantise_weight(w, name)
        exact = defined(x, weight, exact=True)
        found = rt.linear(x, weight, out_dtype=torch.float32).double()
        # the largest error that sums of 13 bits between additions may have
        assert ((found - exact).abs() <= 2.0**-10 * exact.abs()).all()


@pytest.mark.parametrize("name", FORMATS)
def test_rows_near_the_largest_half(name: str, device: torch.device) -> None:
    weight = weight_of(name, 33, 256, device)
    x = torch.full((3, 256), 6e4, device=device, dtype=torch.float16) * torch.tensor([1, -1, 0], device=device)[:, None]
    found = rt.linear(x, weight, out_dtype=torch.float32)
    assert found.isfinite().all()
    assert (found[2] == 0).all()
    torch.testing.assert_close(found[0], -found[1])


def classes(y: torch.Tensor) -> torch.Tensor:
    """2 for NaN, 1 and -1 for infinities, 0 for finite numbers."""
    return torch.where(y.isnan(), 2.0, y.isposinf().float() - y.isneginf().float())


@pytest.mark.parametrize(
    "bad", [(torch.nan,), (torch.inf,), (-torch.inf,), (torch.inf, -torch.inf), (torch.nan, torch.inf)], ids=str
)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_stays_in_its_row(name: str, bad: tuple[float, ...], device: torch.device) -> None:
    """Its row is NaN where x is quantised, and elsewhere what the product with the dense numbers has in IEEE arithmetic."""
    weight, x = weight_of(name, 33, 256, device), torch.randn(5, 256, device=device).bfloat16()
    kept = torch.tensor([0, 1, 3, 4], device=device)
    for each in (weight, ordered(weight)):
        for deterministic in (False, True):
            broken = x.clone()
            # one of them in another tile of 128 numbers
            broken[2, [7, 200][: len(bad)]] = torch.tensor(bad, device=device).bfloat16()
            due, found = (rt.linear(rows, each, deterministic=deterministic) for rows in (x, broken))
            assert torch.equal(found[kept], due[kept])
            if name in QUANTISES_X or not all(map(math.isinf, bad)):
                assert found[2].isnan().all()
                continue
            exact = broken[2].double() @ each.dequantise(torch.bfloat16).double().T
            assert torch.equal(classes(found[2]), classes(exact))
            # a weight of zero and an infinity are NaN
            assert not found[2].isfinite().any()


def test_one_scale_for_all_rows_keeps_what_is_not_finite(device: torch.device) -> None:
    """Large numbers saturate, and infinity does not: its row is NaN."""
    weight = replace(weight_of("fp8", 33, 256, device), input_scale=torch.tensor(0.02, device=device))
    x = torch.randn(4, 256, device=device)
    due = rt.linear(x, weight)
    x[0, 3], x[1, 3], x[2, 3] = 1e30, torch.inf, -torch.inf
    found = rt.linear(x, weight)
    assert torch.equal(found[3], due[3])
    assert found[0].isfinite().all()
    assert found[1:3].isnan().all()


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_those_of_the_dequantised_weight(name: str, device: torch.device) -> None:
    weight = weight_of(name, 33, 256, device)
    x = torch.randn(2, 5, 256, device=device, requires_grad=True)
    bias = torch.randn(33, device=device, requires_grad=True)
    dy = torch.randn(2, 5, 33, device=device)
    rt.linear(x, weight, bias).backward(dy)
    torch.testing.assert_close(x.grad, dy @ weight.dequantise())
    torch.testing.assert_close(bias.grad, dy.sum((0, 1)))
    half = x.detach().bfloat16().requires_grad_()
    rt.linear(half, weight, out_dtype=torch.float32).backward(dy)
    assert half.grad.dtype == torch.bfloat16
    torch.testing.assert_close(half.grad.float(), dy @ weight.dequantise(), rtol=1e-2, atol=1e-2)


def test_gradcheck(device: torch.device) -> None:
    weight = weight_of("int4, 32, zeros", 5, 64, device)
    x = torch.randn(3, 64, device=device, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, bias: rt.linear(x, weight, bias), (x, bias))
    assert torch.autograd.gradgradcheck(lambda x, bias: rt.linear(x, weight, bias) ** 2, (x, bias))


@pytest.mark.parametrize("name", ["w8", "fp8"])
def test_transforms(name: str, device: torch.device) -> None:
    weight, x = weight_of(name, 33, 256, device), torch.randn(3, 4, 256, device=device)
    w, bias = weight.dequantise(), torch.randn(33, device=device)

    def loss(x, bias):
        return rt.linear(x, weight, bias).sin().sum()

    y = rt.linear(x, weight, bias)
    dx, dbias = grad(loss, argnums=(0, 1))(x, bias)
    torch.testing.assert_close(dx, y.cos() @ w)
    torch.testing.assert_close(dbias, y.cos().sum((0, 1)))
    torch.testing.assert_close(vmap(grad(loss), in_dims=(0, None))(x, bias), dx)
    torch.testing.assert_close(vmap(lambda x: rt.linear(x, weight, bias), in_dims=1, out_dims=1)(x), y)
    biases = torch.stack([bias, 2 * bias, -bias])
    many = vmap(lambda x, bias: rt.linear(x, weight, bias))(x, biases)
    torch.testing.assert_close(many[1], rt.linear(x[1], weight, 2 * bias))
    tangent = torch.randn_like(x)
    found, change = jvp(lambda x: rt.linear(x, weight, bias), (x,), (tangent,))
    torch.testing.assert_close(change, tangent @ w.T)
    torch.testing.assert_close(found, y)
    _, back = vjp(lambda x: rt.linear(x, weight), x)
    torch.testing.assert_close(back(torch.ones_like(y))[0], torch.ones_like(y) @ w)
    with forward_ad.dual_level():
        dual = rt.linear(forward_ad.make_dual(x, tangent), weight, forward_ad.make_dual(bias, torch.ones_like(bias)))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, tangent @ w.T + 1)


@pytest.mark.parametrize("name", FORMATS)
def test_compiled(name: str, device: torch.device) -> None:
    weight, bias = weight_of(name, 33, 256, device), torch.randn(33, device=device)

    def program(x, bias):
        return rt.linear(x * 2, weight, bias).relu()

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (3, 7):
        x = torch.randn(M, 256, device=device, requires_grad=True)
        y = compiled(x, bias)
        assert torch.equal(y, program(x, bias))
        y.sum().backward()
        found, x.grad = x.grad, None
        program(x, bias).sum().backward()
        torch.testing.assert_close(found, x.grad)


def test_autocast_and_inference_mode(device: torch.device) -> None:
    weight, x = weight_of("w8", 33, 256, device), torch.randn(3, 256, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = rt.linear(x, weight)
        assert rt.linear(x.double(), weight).dtype == torch.float64
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, rt.linear(x.bfloat16(), weight))
    with torch.inference_mode():
        assert torch.equal(rt.linear(x, weight), rt.linear(x.clone(), weight))


def test_a_mode_sees_the_operators(device: torch.device) -> None:
    weight, x = weight_of("w8", 33, 256, device), torch.randn(3, 256, device=device, requires_grad=True)
    with watching() as watch:
        rt.linear(x, weight).sum().backward()
    assert [call.name for call in watch.calls] == ["linear_quantised", "dequantise_weight"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_know_its_batch(name: str, device: torch.device) -> None:
    weight, x = weight_of(name, 77, 384, device), torch.randn(256, 384, device=device).bfloat16()
    together = rt.linear(x, weight, deterministic=True)
    for n in (0, 100, 255):
        assert torch.equal(rt.linear(x[n : n + 1], weight, deterministic=True), together[n : n + 1])


@pytest.mark.parametrize("name", QUANTISES_X)
def test_rows_that_are_quantised_already(name: str, device: torch.device) -> None:
    weight, x = weight_of(name, 33, 256, device), torch.randn(2, 3, 256, device=device).bfloat16()
    rows = quantise_rows(x, name)
    assert rows.shape == x.shape
    found = rt.linear(rows, weight)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, rt.linear(x, weight))


def test_one_scale_for_all_activations(device: torch.device) -> None:
    weight, x = weight_of("fp8", 33, 256, device), torch.randn(5, 256, device=device)
    given = rt.QuantisedWeight(*weight.parts[:4], "fp8", 256, weight.shape, None, torch.tensor(0.02, device=device))
    found = rt.linear(x, given)
    assert_product(found, x, given)
    assert (found - rt.linear(x, weight)).abs().max() > 0
    torch.testing.assert_close(found, rt.linear(x, weight), rtol=0.3, atol=0.3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in QUANTISES_X])
def test_gates(name: str, activation: str, device: torch.device) -> None:
    """Without a kernel that makes both, it is the product and the gate, one after the other."""
    weight, bias = weight_of(name, 64, 128, device), torch.randn(64, device=device)
    x = torch.randn(5, 256, device=device).bfloat16()[:, ::2]
    for rows in (x, x[:0]):
        due = gated_halves(rt.linear(rows, weight, bias), activation)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), torch.autocast(device.type, torch.bfloat16):
                found = multiply_gated(rows, weight, bias, activation)
            assert (found.dtype, found.shape) == (torch.bfloat16, (len(rows), 32))
            torch.testing.assert_close(found, due, rtol=2e-2, atol=2e-2)
    assert not takes(x.cpu(), weight.to("cpu"), None)
    # derivatives take the steps
    x.requires_grad_()
    (found,) = torch.autograd.grad(multiply_gated(x, weight, bias, activation).float().sum(), x)
    (due,) = torch.autograd.grad(gated_halves(rt.linear(x, weight, bias), activation).float().sum(), x)
    torch.testing.assert_close(found, due)
    assert vmap(lambda x: multiply_gated(x, weight, bias, activation))(x.detach()[:, None]).shape == (5, 1, 32)


def test_compiled_gates(device: torch.device) -> None:
    weight, x = weight_of("int4", 64, 128, device), torch.randn(5, 128, device=device)
    torch._dynamo.reset()
    run = torch.compile(lambda x: multiply_gated(x, weight, None, "silu"), fullgraph=True, backend="aot_eager")
    assert torch.equal(run(x), multiply_gated(x, weight, None, "silu"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_in_codes(activation: str, device: torch.device) -> None:
    """They have the bits of a product, a gate and `quantise_rows`, one after the other."""
    weight, bias = weight_of("fp8", 64, 128, device), torch.randn(64, device=device)
    scale, x = torch.tensor([0.02], device=device), torch.randn(5, 128, device=device).bfloat16()
    for part in (x, x[:0]):
        rows = quantise_rows(part)
        due = quantise_rows(gated_halves(rt.linear(rows, weight, bias), activation), scale=scale)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), torch.autocast(device.type, torch.bfloat16):
                found = multiply_gated_rows(rows, weight, bias, activation, scale)
            assert (found.format, found.dtype, found.shape) == ("fp8", torch.bfloat16, (len(part), 32))
            assert found.codes.dtype == torch.float8_e4m3fn
            torch.testing.assert_close(found.dequantise(), due.dequantise(), rtol=0.13, atol=0.02)
            if device.type == "cpu":
                assert torch.equal(found.codes.view(torch.uint8), due.codes.view(torch.uint8))
                assert torch.equal(found.scales, due.scales)
    torch._dynamo.reset()
    run = torch.compile(
        lambda x: multiply_gated_rows(quantise_rows(x), weight, bias, activation, scale).dequantise(), fullgraph=True,
        backend="aot_eager",
    )  # fmt: skip
    torch.testing.assert_close(run(x), multiply_gated_rows(quantise_rows(x), weight, bias, activation, scale).dequantise())


def test_which_gates_leave_in_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper those of FP8 rows in 16 bits with an FP8 weight, for as many rows as its product is first for."""
    monkeypatch.setitem(devices._KNOWN, torch.device("cuda", 0), "sm90")

    def asked(M: int, name: str = "fp8", N: int = 64, dtype: torch.dtype = torch.bfloat16, order: bool = False) -> bool:
        weight = weight_of(name, N, 128)
        weight = ordered(weight) if order else weight
        rows = quantise_rows(torch.randn(M, 128), name if name in QUANTISES_X else "fp8")
        codes = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=rows.codes.dtype, shape=(M, 128),
                                requires_grad=False)  # fmt: skip
        return takes_rows(replace(rows, codes=codes, dtype=dtype), weight, None)

    pytest.importorskip("triton.experimental.gluon")
    assert asked(1)
    assert asked(256)
    assert asked(3, dtype=torch.float16)
    assert not asked(257), "PyTorch's product is first"
    assert not asked(3, "int8")
    assert not asked(3, "w8")
    assert not asked(3, N=48)
    assert not asked(3, dtype=torch.float32)
    assert not asked(3, order=True)


def test_columns_in_another_order(device: torch.device) -> None:
    weight, x = ordered(weight_of("int4, 32, zeros", 33, 256, device)), torch.randn(5, 256, device=device)
    assert_product(rt.linear(x, weight), x, weight)


def test_plain_weights(device: torch.device) -> None:
    x, w, bias = (torch.randn(shape, device=device) for shape in ((2, 3, 64), (7, 64), (7,)))
    assert torch.equal(rt.linear(x, w, bias), torch.nn.functional.linear(x, w, bias))
    found = rt.linear(x, w, bias, deterministic=True)
    torch.testing.assert_close(found, rt.linear(x, w, bias))
    assert torch.equal(rt.linear(x[0, :1], w, bias, deterministic=True), found[0, :1])
    assert rt.linear(x, w, out_dtype=torch.bfloat16).dtype == torch.bfloat16
    for fixed in (False, True):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = rt.linear(x, w, bias, deterministic=fixed)
        due = rt.linear(x.bfloat16(), w.bfloat16(), bias.bfloat16(), deterministic=fixed)
        assert torch.equal(y, due)


@pytest.mark.parametrize("name", ["fp8", "fp8_tile", "int8", "w8"])
def test_fp8_on_a_chip_without_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, and not computed slowly in silence; the sentence names what multiplies in 16 bits."""
    monkeypatch.setitem(devices._KNOWN, torch.device("cuda", 0), "sm80")
    weight = weight_of(name, 64, 128)
    product = definition.Product(name, weight.group, 64, 128, torch.bfloat16, False)
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(3, 128))
    asked = backends.ProductCall(x, None, weight.parts, None, product)
    if name in ("int8", "w8"):
        assert backends.chosen(asked, "") is backends.BACKENDS["triton"]
        return
    with pytest.raises(rt.Unsupported, match=r"capability 8\.0; needs 8\.9: w8 and int4 multiply in 16 bits everywhere"):
        backends.chosen(asked, "")
    assert backends.chosen(asked, "definition") is backends.BACKENDS["definition"]
    assert backends.explain(asked).endswith("definition  runs if it is named")


def test_explain() -> None:
    found = rt.explain(torch.randn(3, 256), weight_of("fp8", 33, 256))
    assert "triton      tensors are on cpu; needs a CUDA GPU and Triton" in found
    assert "definition  runs" in found


@pytest.mark.parametrize(
    ("arguments", "words", "error", "sentence"),
    [
        ((torch.randn(3, 255),), {}, rt.InvalidInput, r"x is \(3, 255\) and the weight \(33, 256\)"),
        ((torch.randn(3, 256).long(),), {}, rt.InvalidInput, "x is torch.int64; must be"),
        (
            (torch.randn(3, 256), torch.randn(32)),
            {},
            rt.InvalidInput,
            r"bias is torch.float32 \(32,\); must be float \(33,\)",
        ),
        ((torch.randn(3, 256),), {"out_dtype": torch.int8}, rt.InvalidInput, "out_dtype is torch.int8"),
        (
            (torch.randn(3, 256),),
            {"backend": "cutlass"},
            rt.InvalidInput,
            "backend is 'cutlass'; must be one of hopper, triton",
        ),
        (
            (torch.randn(3, 256),),
            {"backend": "triton"},
            rt.Unsupported,
            "(?s)backend 'triton' cannot multiply this weight\n.*tensors are on cpu.*instead  definition can",
        ),
        ((torch.randn(3, 256, device="meta"),), {}, rt.InvalidInput, "x is on meta and the weight on cpu"),
        (
            (quantise_rows(torch.randn(3, 256), "int8"),),
            {},
            rt.InvalidInput,
            "x is in int8; a weight in w8 multiplies 16 bits",
        ),
        ((torch.randn(3, 256),), {"activation": "silu"}, rt.InvalidInput, "linear has no argument activation"),
    ],
)
def test_wrong_arguments(arguments, words, error, sentence: str) -> None:
    x, *bias = arguments
    with pytest.raises(error, match=sentence):
        rt.linear(x, weight_of("w8", 33, 256), *bias, **words)


def test_wrong_plain_weights() -> None:
    x = torch.randn(3, 64)
    with pytest.raises(rt.InvalidInput, match="weight is list; must be a tensor"):
        rt.linear(x, [1.0])
    with pytest.raises(rt.Unsupported, match="backend is 'triton' and the weight a tensor"):
        rt.linear(x, torch.randn(5, 64), backend="triton")
    with pytest.raises(rt.InvalidInput, match="x is in fp8 and the weight a tensor"):
        rt.linear(quantise_rows(x), torch.randn(5, 64))
    for fixed in (False, True):
        with pytest.raises(rt.InvalidInput, match=r"bias is torch.float32 \(4,\); must be float \(5,\)"):
            rt.linear(x, torch.randn(5, 64), torch.randn(4), deterministic=fixed)
        with pytest.raises(rt.InvalidInput, match=r"out_dtype is torch\.int8; must be bfloat16"):
            rt.linear(x, torch.randn(5, 64), out_dtype=torch.int8, deterministic=fixed)
        with pytest.raises(rt.InvalidInput, match=r"x is torch.float32 and the weight torch.bfloat16; must be alike"):
            rt.linear(x, torch.randn(5, 64).bfloat16(), deterministic=fixed)
    with pytest.raises(rt.InvalidInput, match=r"x is torch\.int64; must be a tensor"):
        rt.linear(x.long(), torch.randn(5, 64))
    with pytest.raises(rt.InvalidInput, match="x is on meta and the weight on cpu"):
        rt.linear(x.to("meta"), torch.randn(5, 64), deterministic=True)
    with pytest.raises(rt.InvalidInput, match="bias is list; must be a float tensor"):
        rt.linear(x, torch.randn(5, 64), [0.0] * 5)
