"""FP8 and INT8 attention: the integers of a recipe, its accuracy, its gradients, and its errors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import numerics
from rooftile.exact.backends import eager
from rooftile.exact.masks import Mask
from rooftile.exact.spec import Spec
from rooftile.exact.spec import decode as decode_spec
from rooftile.numerics.precision import decode
from rooftile.numerics.recipe import codes, mean_key, scales_of_rows
from tests.columns import columns_of

RECIPES = {
    "fp8": rt.Precision(),
    "int8": rt.Precision(qk="int8"),
    "per tensor": rt.Precision(granularity="tensor", incoherent=False, smooth_k=False),
    "per head": rt.Precision(granularity="head", smooth_k=False),
    "per row": rt.Precision(granularity="row"),
    "int8 per row": rt.Precision(qk="int8", granularity="row", incoherent=False),
    "int8, native values": rt.Precision(qk="int8", pv="native"),
    "native scores": rt.Precision(qk="native"),
}
recipes = pytest.mark.parametrize("precision", RECIPES.values(), ids=RECIPES)
MASKS = [rt.FULL, rt.CAUSAL, rt.CAUSAL & rt.Window(50), rt.Chunk(90)]


def inputs(T: int, S: int, H: int, Hk: int, dim: int, dim_v: int = 0, B: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, T, H, dim), torch.randn(B, S, Hk, dim), torch.randn(B, S, Hk, dim_v or dim)


def with_outliers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draws N(0, 1), plus N(0, 100) for one entry in a thousand: the distribution of FlashAttention-3's paper."""
    rare = torch.rand(shape, generator=generator) < 1e-3
    return torch.randn(shape, generator=generator) + 10 * torch.randn(shape, generator=generator) * rare


def rmse(x: Tensor, exact: Tensor) -> float:
    return (x.double() - exact).square().mean().sqrt().item()


@pytest.mark.parametrize(("dim", "fp8", "int8"), [(64, 1.5, 2.6), (128, 1.7, 2.6)])
def test_recipes_are_as_much_better_than_one_scale_as_they_promise(dim: int, fp8: float, int8: float) -> None:
    found: dict[str, float] = dict.fromkeys(("per tensor", "fp8", "int8"), 0.0)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (with_outliers((1, 2048, 2, dim), generator) for _ in range(3))
        exact = rt.attention(q.double(), k.double(), v.double())
        for name in found:
            found[name] += rmse(rt.attention(q, k, v, precision=RECIPES[name]), exact)
    assert found["per tensor"] / found["fp8"] >= fp8
    assert found["per tensor"] / found["int8"] >= int8


@recipes
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_output_is_that_of_the_numbers_behind_the_codes(precision: rt.Precision, mask: Mask) -> None:
    """Equals exact attention on the dequantised tensors, except for the rounding of weights."""
    q, k, v = inputs(130, 200, 4, 2, 64, 32)
    qkv = rt.quantise_qkv(q, k, v, precision)
    plain = [
        (codes(x) * scales_of_rows(x, scales, precision.granularity, None)).double()
        for x, scales in ((qkv.q, qkv.q_scales), (qkv.k, qkv.k_scales), (qkv.v, qkv.v_scales))
    ]
    due, due_lse = rt.attention_with_lse(*plain, mask)
    if qkv.shift is not None:
        due_lse = due_lse + qkv.shift.mT.double() * 64**-0.5
    o, lse = rt.attention_with_lse(q, k, v, mask, precision=precision)
    torch.testing.assert_close(lse.double(), due_lse, rtol=0, atol=2e-5)
    # the relative error of a weight is at most 1/16, and errors are independent
    size = 2**-4 * plain[2].abs().amax() if precision.pv == "fp8" else 1e-5
    assert (o.double() - due).abs().max() <= size
    assert rmse(o, due) <= 0.3 * size


@recipes
def test_lse_is_that_of_the_original(precision: rt.Precision) -> None:
    q, k, v = inputs(100, 150, 2, 2, 64)
    k = k + 3 * torch.randn(2, 64)
    _, exact = rt.attention_with_lse(q.double(), k.double(), v.double(), rt.CAUSAL)
    o, lse = rt.attention_with_lse(q, k, v, rt.CAUSAL, precision=precision)
    assert lse.dtype == torch.float32
    assert (lse - exact).abs().max() < 0.6
    assert (lse - exact).abs().mean() < 0.08
    qkv = rt.quantise_qkv(q, k, v, precision)
    again, again_lse = rt.attention_quantised_with_lse(qkv, rt.CAUSAL)
    assert torch.equal(o, again)
    assert torch.equal(lse, again_lse)


def test_smoothing_takes_what_keys_share() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 600, 2, 64, generator=generator) for _ in range(3))
    k = k + 8 * torch.randn(2, 64, generator=generator)
    exact = rt.attention(q.double(), k.double(), v.double())
    errors = [rmse(rt.attention(q, k, v, precision=rt.Precision(smooth_k=smooth)), exact) for smooth in (False, True)]
    assert errors[1] < 0.6 * errors[0]


# one scale for the whole packed tensor differs from one per sequence
@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.granularity != "tensor"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_packing_changes_no_bit(name: str, mask: Mask) -> None:
    precision = RECIPES[name]
    lengths = [(130, 200), (1, 5), (0, 7), (300, 300)]
    parts = [inputs(T, S, 4, 2, 32, B=1) for T, S in lengths]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0) for n in zip(*lengths, strict=True))
    q, k, v = (torch.cat([part[n][0] for part in parts]) for n in range(3))
    o, lse = rt.attention_packed_with_lse(q, k, v, cu_q, cu_k, mask, precision=precision)
    for b, part in enumerate(parts):
        t = slice(cu_q[b], cu_q[b + 1])
        due, due_lse = rt.attention_with_lse(*part, mask, precision=precision)
        torch.testing.assert_close(o[t], due[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(lse[:, t], due_lse[0], rtol=0, atol=1e-5)
    qkv = rt.quantise_qkv(q, k, v, precision, cu_q=cu_q, cu_k=cu_k)
    alone = rt.quantise_qkv(*parts[3], precision)
    assert torch.equal(qkv.q[131:], alone.q[0])
    assert torch.equal(codes(qkv.k[212:]), codes(alone.k[0]))


@recipes
def test_a_nan_stays_where_exact_attention_has_it(precision: rt.Precision) -> None:
    q, k, v = inputs(140, 140, 2, 1, 32)
    q[0, 3, 1, 5] = torch.nan
    k[0, 60, 0, 0] = torch.inf
    v[1, 80, 0, 7] = -torch.inf
    exact = rt.attention(q, k, v, rt.CAUSAL)
    found, lse = rt.attention_with_lse(q, k, v, rt.CAUSAL, precision=precision)
    # an infinite value gives infinity there, and NaN in FP8
    assert torch.equal(found.isnan(), ~exact.isfinite())
    assert exact[0, 60:].isnan().all()
    assert lse[0, :, 60:].isnan().all()
    assert lse[1].isfinite().all()


def test_sinks_and_softcap_see_true_scores() -> None:
    q, k, v = inputs(90, 90, 2, 2, 64)
    k = k + 2 * torch.randn(2, 64)
    sinks = torch.tensor([1.0, -2.0])
    for options in ({"sinks": sinks}, {"softcap": 5.0}, {"sinks": sinks, "softcap": 5.0, "scale": 0.3}):
        exact, exact_lse = rt.attention_with_lse(q, k, v, rt.CAUSAL, **options)
        o, lse = rt.attention_with_lse(q, k, v, rt.CAUSAL, precision="int8", **options)
        kept = rt.attention_quantised_with_lse(rt.quantise_qkv(q, k, v, "int8"), rt.CAUSAL, **options)
        assert torch.equal(kept[0], o)
        assert torch.equal(kept[1], lse)
        assert (lse - exact_lse).abs().max() < 0.2
        assert rmse(o, exact.double()) < 0.06


@pytest.mark.parametrize(("T", "S"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend(T: int, S: int) -> None:
    q, k, v = inputs(T, S, 2, 2, 16)
    o, lse = rt.attention_with_lse(q, k, v, precision="fp8")
    assert o.shape == (2, T, 2, 16)
    assert not o.any()
    assert (lse == -torch.inf).all()


def test_rows_that_see_nothing_are_zero() -> None:
    q, k, v = inputs(20, 10, 2, 2, 16)
    o, lse = rt.attention_with_lse(q, k, v, rt.CAUSAL, precision="int8")
    assert not o[:, :10].any()
    assert (lse[:, :, :10] == -torch.inf).all()
    assert o[:, 10:].all()


def test_gradients_are_those_of_native_attention() -> None:
    q, k, v = (x.bfloat16().requires_grad_() for x in inputs(70, 90, 4, 2, 32))
    sinks = torch.randn(4, requires_grad=True)
    do, dlse = torch.randn(2, 70, 4, 32).bfloat16(), torch.randn(2, 4, 70)
    found = {}
    for precision in ("native", "fp8"):
        outputs = rt.attention_with_lse(q, k, v, rt.CAUSAL, sinks=sinks, precision=precision, backend="eager")
        found[precision] = torch.autograd.grad(outputs, (q, k, v, sinks), (do, dlse))
    for a, b in zip(found["native"], found["fp8"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def test_a_backward_is_given_what_native_attention_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's backward recomputes weights from lse: with the lse of rounded scores they would not sum to one."""
    given = {}

    def backward(inputs, spec):
        given.update(o=inputs.o, lse=inputs.lse, precision=spec.precision)
        return real(inputs, spec)

    real = eager.backward
    monkeypatch.setattr(eager, "backward", backward)
    q, k, v = (x.requires_grad_() for x in inputs(30, 30, 2, 2, 16))
    o, lse = rt.attention_with_lse(q, k, v, backend="eager")
    rt.attention(q, k, v, precision="fp8").sum().backward()
    assert torch.equal(given["o"], o)
    assert torch.equal(given["lse"], lse)
    assert given["precision"] is None


def test_weights_are_rounded_as_the_kernels_round_them() -> None:
    """Two keys have weights 1 and 0.3: 256 times the second is between the codes 72 and 80."""
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 2, 1, 16)
    q[..., 0], k[0, 1, 0, 0] = 1.0, math.log(0.3)
    v = torch.zeros(1, 2, 1, 16)
    v[0, 1] = 1.0
    recipe = rt.Precision(qk="native")
    o, lse = rt.attention_with_lse(q, k, v, precision=recipe, scale=1.0)
    torch.testing.assert_close(o, torch.full_like(o, 80 / 256 / 1.3))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(1.3)))


@pytest.mark.parametrize("step", [3.0, 40.0, 2000.0])
def test_scores_may_grow_from_block_to_block(step: float) -> None:
    """Weights are relative to scores of earlier blocks, from the last keys on; these scores are far above them."""
    k = torch.zeros(1, 500, 1, 16)
    k[0, :, 0, 0] = step * torch.arange(500).flip(0).div(128, rounding_mode="floor")
    q, v = torch.ones(1, 5, 1, 16), torch.randn(1, 500, 1, 16)
    # similar scores differ by few FP8 steps
    precision = rt.Precision(incoherent=False, smooth_k=False)
    found, lse = rt.attention_with_lse(q, k, v, scale=1.0, precision=precision)
    due, due_lse = rt.attention_with_lse(q, k, v, scale=1.0)
    torch.testing.assert_close(found, due, rtol=0, atol=0.05)
    torch.testing.assert_close(lse, due_lse, rtol=0.04, atol=0.1)


def test_a_compiled_call_is_the_same() -> None:
    q, k, v = inputs(40, 40, 2, 2, 16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rt.attention(q, k, v, rt.CAUSAL, precision="fp8")

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v))


def test_the_mean_key_is_exact_in_any_order() -> None:
    k = torch.randn(1, 1000, 2, 16).bfloat16()
    assert torch.equal(mean_key(k, None), mean_key(k[:, torch.randperm(1000)], None))
    torch.testing.assert_close(mean_key(k, None), k.float().mean(1), rtol=0, atol=1e-6)


def test_the_mean_key_of_a_long_sequence_is_of_every_nth() -> None:
    k = torch.randn(3, 3100, 2, 16).bfloat16()
    due = k[:, ::3].float().mean(1)
    torch.testing.assert_close(mean_key(k, None), due, rtol=0, atol=1e-6)
    # packed: each sequence by its own length
    lengths = torch.tensor([3100, 0, 5, 2047, 2048])
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    rows = torch.cat([k[0], k[1, :5], k[1, :2047], k[2, :2048]])
    found = mean_key(rows, cu)
    assert torch.equal(found[0], mean_key(k[:1], None)[0])
    assert not found[1].any()
    for n, x, step in ((2, k[1, :5], 1), (3, k[1, :2047], 1), (4, k[2, :2048], 2)):
        torch.testing.assert_close(found[n], x[::step].float().mean(0), rtol=0, atol=1e-6)


def test_integers_are_what_the_formats_say() -> None:
    """Without a rotation, the result equals `rooftile.numerics.quantise`, block by block."""
    q, k, v = inputs(300, 300, 2, 2, 48)
    for qk, name in (("fp8", "fp8_e4m3"), ("int8", "int8")):
        for granularity in ("tensor", "head", "block", "row"):
            recipe = rt.Precision(qk=qk, granularity=granularity, incoherent=False, smooth_k=False)
            qkv = rt.quantise_qkv(q, k, v, recipe)
            due = numerics.quantise(q, name, granularity=granularity)
            assert torch.equal(codes(qkv.q), numerics.decode(due.values, due.format))
            values = numerics.quantise(v, granularity="channel" if granularity == "row" else granularity)
            assert torch.equal(codes(qkv.v), numerics.decode(values.values, values.format))


def test_columns_are_values_in_the_order_of_weights() -> None:
    """Each of four lanes holds, of 16 keys, two of the first eight, then two of the second eight."""
    v = torch.randn(2, 200, 3, 32).to(torch.float8_e4m3fn)
    columns = columns_of(v, None)
    assert columns.shape == (2, 3, 32, 256)
    for place, key in ((0, 0), (1, 1), (2, 8), (3, 9), (4, 2), (7, 11), (12, 6), (15, 15), (16 + 6, 16 + 10)):
        assert torch.equal(columns[..., place].float(), v[:, key].float())
    assert not columns[..., 208:].float().any()
    cu = torch.tensor([0, 130, 130, 200])
    packed = columns_of(v[0], cu).float()
    assert packed.shape == (1, 3, 32, 128 * (200 // 128 + 3))
    # the third sequence's part: 130 // 128 + 2
    assert torch.equal(packed[0, :, :, 3 * 128 + 2], v[0, 138].float())


def test_memory_is_a_quarter_of_fp32() -> None:
    q, k, v = inputs(1024, 1024, 2, 2, 64)
    qkv = rt.quantise_qkv(q, k, v)
    assert 3 * q.numel() <= qkv.nbytes <= 1.05 * 3 * q.numel()


@pytest.mark.parametrize("packed", [False, True])
def test_values_in_columns_are_refused_by_who_reads_rows(packed: bool) -> None:
    q, k, v = inputs(130, 130, 2, 2, 16, B=1)
    cu = torch.tensor([0, 130], dtype=torch.int32) if packed else None
    made = rt.quantise_qkv(*(x[0] if packed else x for x in (q, k, v)), cu_q=cu, cu_k=cu)
    turned = replace(made, v=columns_of(made.v, made.cu_k), v_order="columns")
    assert (made.v_order, turned.dim_v) == ("rows", made.dim_v)
    for backend in ("eager", "triton"):
        with pytest.raises(rt.Unsupported, match=f"quantised in columns; reads rows, which .*backend='{backend}'"):
            rt.attention_quantised(turned, backend=backend)
    with pytest.raises(rt.Unsupported, match="v-in-columns"):
        rt.attention_quantised(turned)
    with pytest.raises(rt.Unsupported, match="quantised in rows; reads columns"):
        rt.attention_quantised(made, backend="hopper")


@recipes
def test_a_recipe_crosses_as_a_word(precision: rt.Precision) -> None:
    assert decode(precision.code) == precision
    spec = Spec(dtype=torch.bfloat16, dim=64, dim_v=64, scale=0.125, precision=precision)
    assert decode_spec(spec.code) == spec
    kept = replace(spec, v_order="columns")
    assert decode_spec(kept.code) == kept != spec
    assert str(precision) in str(spec)
    assert decode_spec(spec.code) != Spec(dtype=torch.bfloat16, dim=64, dim_v=64, scale=0.125)


def test_native_is_native() -> None:
    q, k, v = inputs(20, 20, 2, 2, 16)
    due = rt.attention(q, k, v)
    for precision in ("native", rt.Precision(qk="native", pv="native")):
        assert torch.equal(rt.attention(q, k, v, precision=precision), due)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q: rt.attention(q, q, q, precision="fp9"), "precision is 'fp9'; must be 'native', 'fp8', 'int8', or a roof"),
        (lambda q: rt.attention(q, q, q, precision=8), "precision is 8; must be"),
        (lambda _: rt.Precision(qk="int4"), "Precision: qk is 'int4'; has native, fp8, int8"),
        (lambda _: rt.Precision(granularity="channel"), "granularity is 'channel'; has tensor, head, block, row"),
        (lambda _: rt.Precision(incoherent=1), "incoherent is 1; has True, False"),
        (lambda q: rt.quantise_qkv(q, q, q, "native"), "precision is native; must be one that quantises"),
        (lambda q: rt.quantise_qkv(q, q, q, cu_q=torch.tensor([0])), "cu_q and cu_k must both be given"),
        (lambda q: rt.attention_quantised(q), "qkv is a torch.float32 tensor.*; must be what quantise_qkv returns"),
        (lambda q: rt.attention_quantised(rt.quantise_qkv(q, q, q), "causal"), "mask is 'causal'; must be a rooftile mask"),
        (lambda q: rt.attention_quantised(rt.quantise_qkv(q, q, q), sinks=torch.ones(3)), r"sinks is \(3,\); must be \(H,\)"),
    ],
)
def test_bad_input_is_told(call, words: str) -> None:
    with pytest.raises(rt.InvalidInput, match=words):
        call(torch.randn(1, 8, 2, 16))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bias": torch.zeros(8, 8)}, "bias with precision fp8; has masks, groups, softcap and sinks with it"),
        ({"dropout": 0.1}, "dropout with precision fp8; has none with it"),
        ({"backend": "tiled"}, "precision fp8; computes in the dtype of its inputs"),
    ],
)
def test_what_a_recipe_has_not_is_refused(options, words: str) -> None:
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(rt.Unsupported, match=words):
        rt.attention(q, q, q, precision="fp8", **options)


def test_a_head_dim_without_a_transform_is_refused() -> None:
    q = torch.randn(1, 8, 2, 20)
    with pytest.raises(rt.Unsupported, match=r"head dim 20 has no Hadamard transform; has multiples of 16, or Precision"):
        rt.attention(q, q, q, precision="fp8")
    with pytest.raises(rt.Unsupported, match="head dim 20 has no Hadamard transform"):
        rt.quantise_qkv(q, q, q)
    assert rt.attention(q, q, q, precision=rt.Precision(incoherent=False)).shape == q.shape
