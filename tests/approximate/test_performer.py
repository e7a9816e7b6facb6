"""Performer: chunks against the definition, the projection's distribution, known answers, causality, and bad input."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.recurrent.linear.by_chunks import CHUNK
from tests.approximate.tolerance import assert_within, gradients
from tests.grids import pairs, swept

KINDS = ("positive", "hyperbolic", "trigonometric", "relu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MASKS = [rt.CAUSAL, rt.FULL]
# T, H, Hk, D, Dv, m
SIZES = {
    "none": (0, 2, 2, 8, 8, 8),
    "one": (1, 2, 1, 8, 4, 6),
    "odd": (37, 5, 1, 16, 8, 20),
    "more": (CHUNK + 1, 16, 8, 8, 8, 16),
}


def inputs(T: int, H: int, Hk: int, D: int, Dv: int, dtype: torch.dtype = torch.float32, B: int = 2) -> list[Tensor]:
    return [torch.randn(B, T, h, d).to(dtype) for h, d in ((H, D), (Hk, D), (Hk, Dv))]


def answer(
    tensors: list[Tensor], state: list[Tensor], dtype: torch.dtype, mask: rt.Mask, features: ap.Features, path: str
) -> dict[str, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {n: x.to(dtype).requires_grad_() for n, x in zip("qkv", tensors, strict=True)}
    leaves |= {n: x.to(wide).requires_grad_() for n, x in zip("Sz", state, strict=False)}
    q, k, v, *given = leaves.values()
    past = (*given, state[2].to(wide))
    o, (S, z, largest) = ap.performer_with_state(q, k, v, mask, features=features, state=past, backend=path)
    assert o.dtype == dtype
    assert not largest.requires_grad
    outputs = {"o": o, "last S": S, "last z": z}
    return outputs | gradients(outputs, leaves, tensors[0].dtype) | {"largest": largest}


@pytest.mark.parametrize(("size", "mask", "kind", "dtype"), swept(product(SIZES, MASKS, KINDS, DTYPES), pairs), ids=str)
def test_chunks_equal_the_definition(size: str, mask: rt.Mask, kind: str, dtype: torch.dtype) -> None:
    T, H, Hk, D, Dv, m = SIZES[size]
    tensors = inputs(T, H, Hk, D, Dv, dtype)
    if kind == "trigonometric":
        # sums of weights of both signs come near zero, where nothing is exact: short vectors keep them above it
        tensors[:2] = [x / 4 for x in tensors[:2]]
    # a largest as that of tokens like these
    state = [torch.rand(2, Hk, m, Dv), torch.rand(2, Hk, m) + 0.5, torch.randn(2, Hk)]
    features = ap.Features.draw(D, m, kind=kind, seed=3)
    found = answer(tensors, state, dtype, mask, features, "tiled")
    exact, plain = (answer(tensors, state, x, mask, features, "eager") for x in (torch.float64, dtype))
    assert_within(found, exact, plain, dtype, terms=max(T * H // Hk, 64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_gradients_against_finite_differences(mask: rt.Mask, kind: str) -> None:
    features = ap.Features.draw(3, 8, kind=kind, seed=1)
    leaves = [(x / 2).double().requires_grad_() for x in inputs(5, 4, 2, 3, 2, B=1)]
    for path in ("tiled", "eager"):
        assert torch.autograd.gradcheck(lambda *x, path=path: ap.performer(*x, mask, features=features, backend=path), leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_the_map_and_its_products_are_the_weights(kind: str) -> None:
    """Known answer: features(q) features(k)^T, normalised by rows, times v, is the output."""
    q, k, v = (x.double() for x in inputs(20, 2, 2, 8, 8))
    features = ap.Features.draw(8, 16, kind=kind)
    a = torch.einsum("bthm,bshm->bhts", features(q), features(k)).tril()
    due = torch.einsum("bhts,bshd->bthd", a, v) / a.sum(-1).transpose(1, 2)[..., None]
    torch.testing.assert_close(ap.performer(q, k, v, rt.CAUSAL, features=features), due, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "trigonometric"])
@pytest.mark.parametrize("orthogonal", [True, False])
def test_products_of_features_estimate_the_exponential_without_bias(orthogonal: bool, kind: str) -> None:
    x, y = torch.randn(2, 3, 4).double().clamp(-1, 1) * 0.7
    due = torch.exp(x @ y.T * 4**-0.5)
    features = ap.Features.draw(4, 20000, kind=kind, orthogonal=orthogonal)
    torch.testing.assert_close(features(x) @ features(y).T, due, rtol=0.05, atol=0.03)


def test_many_features_give_attention() -> None:
    """Known answer: the estimate tends to exact attention, and a sixteenth of the features leaves four times the error."""
    q, k, v = inputs(64, 2, 1, 16, 16)
    q, k = q / 2, k / 2
    due = rt.attention(q, k, v, rt.CAUSAL)

    def error(m: int) -> float:
        drawn = [ap.performer(q, k, v, rt.CAUSAL, features=ap.Features.draw(16, m, seed=n)) for n in range(32)]
        return math.sqrt(sum((o - due).square().mean().item() for o in drawn) / 32)

    few, many = error(64), error(1024)
    assert many < 0.1
    assert 2.5 < few / many < 6.5


def test_keys_of_one_vector_are_averaged() -> None:
    """Known answer: equal keys have equal weights whatever the features are, so rows are means of values."""
    q, _, v = inputs(40, 2, 2, 8, 8)
    found = ap.performer(q, torch.randn(8).expand(2, 40, 2, 8), v, rt.CAUSAL, features=ap.Features.draw(8, 32))
    torch.testing.assert_close(found, v.cumsum(1) / torch.arange(1, 41)[:, None, None], rtol=1e-4, atol=1e-5)


def test_a_scale_is_a_factor_of_queries_and_keys() -> None:
    """Known answer: scale 4 s of q and k is scale s of 2 q and 2 k."""
    q, k, v = inputs(30, 2, 2, 8, 8)
    features = ap.Features.draw(8, 32)
    due = ap.performer(2 * q, 2 * k, v, rt.CAUSAL, features=features, scale=0.1)
    torch.testing.assert_close(ap.performer(q, k, v, rt.CAUSAL, features=features, scale=0.4), due, rtol=1e-4, atol=1e-5)


def test_rows_of_a_projection_are_orthogonal_in_blocks() -> None:
    w = ap.Features.draw(16, 40, seed=5).projection.double()
    for block in (w[:16], w[16:32], w[32:]):
        products = block @ block.T
        torch.testing.assert_close(products, torch.diag(products.diagonal()), rtol=0, atol=1e-4)
    # blocks are drawn each by itself
    assert (w[:16] @ w[16:32].T).abs().max() > 1
    same = ap.Features.draw(16, 40, lengths="sqrt").projection
    torch.testing.assert_close(same.norm(dim=1), torch.full((40,), 4.0))


def test_lengths_are_norms_of_gaussian_vectors_and_directions_are_uniform() -> None:
    """Signs of R's diagonal that are left as they come make the first row's components lean to one side."""
    drawn = torch.stack([ap.Features.draw(4, 4, seed=n).projection for n in range(2000)])  # (2000, 4, 4)
    squares = drawn.square().sum(-1)
    # chi-squared of four degrees: mean 4, variance 8
    assert abs(squares.mean().item() - 4) < 0.2
    assert abs(squares.var().item() - 8) < 1.0
    assert drawn.mean(0).abs().max() < 0.1
    torch.testing.assert_close(drawn.square().mean(0), torch.ones(4, 4), rtol=0.15, atol=0)
    # the first component of each row is positive as often as not
    assert (drawn > 0).float().mean(0).sub(0.5).abs().max() < 0.05


def test_a_seed_is_a_projection() -> None:
    features = ap.Features.draw(8, 16, seed=1)
    same, other = ap.Features.draw(8, 16, seed=1), ap.Features.draw(8, 16, seed=np.int64(2))
    assert torch.equal(features.projection, same.projection)
    assert not torch.equal(features.projection, other.projection)
    address = features.projection.data_ptr()
    assert features.redraw(2) is features
    assert torch.equal(features.projection, other.projection)
    assert features.projection.data_ptr() == address
    assert "m=16, kind='positive', orthogonal" in repr(features)


@pytest.mark.parametrize("path", ["tiled", "eager"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("later", [1.0, 30.0, 1e4])
def test_no_row_knows_later_tokens(later: float, kind: str, path: str) -> None:
    """Keys so long that a largest over the whole text would make all earlier weights zero; every bit must stay."""
    q, k, v = inputs(CHUNK + 30, 2, 2, 8, 8)
    features, cut = ap.Features.draw(8, 16, kind=kind), CHUNK + 10
    due = ap.performer(q, k, v, rt.CAUSAL, features=features, backend=path)
    for x in (q, k, v):
        x[:, cut:] = later * torch.randn_like(x[:, cut:])
    found = ap.performer(q, k, v, rt.CAUSAL, features=features, backend=path)
    assert torch.equal(found[:, :cut], due[:, :cut])
    assert not torch.equal(found[:, cut:], due[:, cut:])
    assert found.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["tiled", "eager"])
@pytest.mark.parametrize("cut", [0, 1, CHUNK, 150])
def test_a_state_goes_on_where_it_ended(cut: int, path: str, kind: str) -> None:
    leaves = [(x / 2).double().requires_grad_() for x in inputs(160, 4, 2, 8, 8)]
    options = {"features": ap.Features.draw(8, 16, kind=kind), "backend": path}
    o, last = ap.performer_with_state(*leaves, rt.CAUSAL, **options)
    first, state = ap.performer_with_state(*(x[:, :cut] for x in leaves), rt.CAUSAL, **options)
    second, end = ap.performer_with_state(*(x[:, cut:] for x in leaves), rt.CAUSAL, state=state, **options)
    torch.testing.assert_close(torch.cat((first, second), 1), o)
    torch.testing.assert_close(end, last)
    incoming = torch.randn_like(o)
    due = torch.autograd.grad(o, leaves, incoming)
    for x, y in zip(torch.autograd.grad(torch.cat((first, second), 1), leaves, incoming), due, strict=True):
        torch.testing.assert_close(x, y)


def test_token_by_token_gives_the_rows_of_the_whole() -> None:
    q, k, v = inputs(30, 4, 2, 8, 8)
    features, state, rows = ap.Features.draw(8, 32), None, []
    options = {"features": features}
    for t in range(30):
        o, state = ap.performer_with_state(*(x[:, t : t + 1] for x in (q, k, v)), rt.CAUSAL, state=state, **options)
        rows.append(o)
    torch.testing.assert_close(torch.cat(rows, 1), ap.performer(q, k, v, rt.CAUSAL, features=features), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_change_the_state_in_place_and_give_the_rows_of_the_whole(kind: str, dtype: torch.dtype) -> None:
    q, k, v = inputs(40, 4, 2, 8, 6, dtype)
    # the largest exponent rises and falls along the text
    k = k * (1 + torch.arange(40)[:, None, None] % 7).to(dtype)
    features = ap.Features.draw(8, 16, kind=kind, seed=1)
    whole, last = ap.performer_with_state(q, k, v, rt.CAUSAL, features=features, scale=0.3)
    _, state = ap.performer_with_state(q[:, :0], k[:, :0], v[:, :0], rt.CAUSAL, features=features)
    addresses = [x.data_ptr() for x in state]
    steps = [ap.performer_step(*(x[:, t : t + 1] for x in (q, k, v)), state, features=features, scale=0.3) for t in range(40)]
    assert [x.data_ptr() for x in state] == addresses
    # in bf16 a sum of weights near 0 makes much of a rounding
    bound = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=bound, atol=bound)
    torch.testing.assert_close(state, last, rtol=1e-3, atol=1e-3)


def test_a_step_refuses_several_tokens_and_gradients() -> None:
    q, k, v = inputs(2, 2, 2, 8, 6)
    features = ap.Features.draw(8, 16)
    _, state = ap.performer_with_state(q, k, v, rt.CAUSAL, features=features)
    with pytest.raises(rt.InvalidInput, match="q has length 2 and k has 2; a step takes one token: write performer"):
        ap.performer_step(q, k, v, state, features=features)
    q, k, v = (x[:, :1] for x in (q, k, v))
    with pytest.raises(rt.InvalidInput, match="state is a tuple of 2; must be the tensors"):
        ap.performer_step(q, k, v, state[:2], features=features)
    with pytest.raises(rt.Unsupported, match="performer_step has no gradient, and an input requires one"):
        ap.performer_step(q.clone().requires_grad_(), k, v, state, features=features)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("path", ["tiled", "eager"])
def test_packed_sequences_are_computed_each_by_itself(path: str, mask: rt.Mask) -> None:
    lengths = [3, 0, CHUNK + 7, 1]
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    leaves = [x[0].double().requires_grad_() for x in inputs(sum(lengths), 4, 2, 8, 6, B=1)]
    options = {"features": ap.Features.draw(8, 16), "backend": path}
    o, last = ap.performer_with_state(*leaves, mask, cu=cu, **options)
    due = [ap.performer_with_state(*(x[None, cu[b] : cu[b + 1]] for x in leaves), mask, **options) for b in range(4)]
    torch.testing.assert_close(o, torch.cat([x[0] for x, _ in due]))
    for n, x in enumerate(last):
        torch.testing.assert_close(x, torch.cat([state[n] for _, state in due]))
    incoming = torch.randn_like(o)
    found = torch.autograd.grad(o, leaves, incoming)
    for x, y in zip(found, torch.autograd.grad(torch.cat([x[0] for x, _ in due]), leaves, incoming), strict=True):
        torch.testing.assert_close(x, y)
    no_cu = torch.zeros(1, dtype=torch.int32)
    o, last = ap.performer_with_state(*(x[:0] for x in leaves), mask, cu=no_cu, **options)
    assert [tuple(x.shape) for x in (o, *last)] == [(0, 4, 6), (0, 2, 16, 6), (0, 2, 16), (0, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_long_vectors_overflow_nothing(kind: str) -> None:
    """Exponents in the thousands: weights become zeros and ones, and no number is NaN."""
    leaves = [(200 * x).requires_grad_() for x in inputs(CHUNK + 20, 2, 2, 16, 16)]
    o = ap.performer(*leaves, rt.CAUSAL, features=ap.Features.draw(16, 32, kind=kind))
    assert o.isfinite().all()
    for grad in torch.autograd.grad(o.sum(), leaves):
        assert grad.isfinite().all()


def test_a_nan_reaches_its_own_row_and_later_ones() -> None:
    tensors = inputs(CHUNK + 40, 4, 2, 8, 6)
    features, place = ap.Features.draw(8, 16), CHUNK + 20
    clean = ap.performer(*tensors, rt.CAUSAL, features=features)
    for n, columns in ((1, slice(None)), (2, slice(2, 3))):
        given = [x.clone() for x in tensors]
        given[n][1, place, 0, 2] = math.nan
        found = ap.performer(*given, rt.CAUSAL, features=features)
        lost = torch.zeros_like(clean, dtype=torch.bool)
        lost[1, place:, :2, columns] = True
        assert torch.equal(found.isnan(), lost)
        assert torch.equal(found[~lost], clean[~lost])


def test_the_projection_has_no_gradient() -> None:
    features = ap.Features(torch.randn(16, 8, requires_grad=True))
    leaves = [x.requires_grad_() for x in inputs(10, 2, 2, 8, 8)]
    ap.performer(*leaves, rt.CAUSAL, features=features).sum().backward()
    assert features.projection.grad is None
    assert not features.projection.requires_grad


def test_autocast_transforms_and_strides() -> None:
    q, k, v = inputs(CHUNK + 5, 4, 2, 8, 8)
    features = ap.Features.draw(8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ap.performer(q, k, v, rt.CAUSAL, features=features)
    assert torch.equal(found, ap.performer(*(x.bfloat16() for x in (q, k, v)), rt.CAUSAL, features=features))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(ap.performer(*turned, rt.CAUSAL, features=features), ap.performer(q, k, v, rt.CAUSAL, features=features))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    for kind in KINDS:
        features = ap.Features.draw(8, 16, kind=kind)

        def loss(*x: Tensor, features: ap.Features = features) -> Tensor:
            return ap.performer(*x, rt.CAUSAL, features=features).square().sum()

        due = torch.autograd.grad(loss(*leaves), leaves)
        for x, y in zip(torch.func.grad(loss, (0, 1, 2))(*(x.detach() for x in leaves)), due, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_one_graph() -> None:
    features = ap.Features.draw(8, 16, kind="hyperbolic")
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in inputs(40, 4, 2, 8, 8)]
    compiled = torch.compile(lambda *x: ap.performer(*x, rt.CAUSAL, features=features), fullgraph=True, backend="aot_eager")
    found, due = compiled(*leaves), ap.performer(*leaves, rt.CAUSAL, features=features)
    torch.testing.assert_close(found, due)
    for x, y in zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(due.sum(), leaves), strict=True):
        torch.testing.assert_close(x, y)


_X = torch.zeros(1, 4, 2, 8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"features": None}, "features is None; must be made by rooftile.approximate.Features.draw"),
        ({"features": ap.Features.draw(16, 8)}, "features were drawn for head dim 16; q has 8"),
        ({"scale": -1.0}, "scale is -1.0; must be above 0: queries and keys are each multiplied by its root"),
        ({"scale": 0}, "scale is 0.0; must be above 0"),
        ({"mask": rt.Chunk(2)}, "Performer has FULL and CAUSAL"),
        ({"state": (_X, _X)}, r"state is .*; must be the tensors \(S, z, largest\) that the function with _with_state returns"),
        ({"backend": "fast"}, "backend is 'fast'; must be 'auto', 'triton', 'tiled' or 'eager'"),
        ({"dropout": 0.1}, "performer has no argument dropout: it has q, k, v, mask, features"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence(changed: dict, message: str) -> None:
    call = {"q": _X, "k": _X, "v": _X, "features": ap.Features.draw(8, 16)} | changed
    with pytest.raises(rt.InvalidInput, match=message):
        ap.performer(**call)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((8, 15), {"kind": "hyperbolic"}, "m is 15; must be even: hyperbolic makes two features of each row"),
        ((8, 0), {}, "m is 0; must be an int of at least 1"),
        ((8.5, 16), {}, "dim is 8.5; must be an int of at least 1"),
        ((8, 16), {"kind": "softmax"}, "kind is 'softmax'; must be 'positive', 'hyperbolic', 'trigonometric' or 'relu'"),
        ((8, 16), {"lengths": "one"}, "lengths is 'one'; must be 'gaussian' or 'sqrt'"),
        ((8, 16), {"seed": None}, "seed is None; must be an int"),
        ((8, 16), {"orthogonal": "yes"}, "orthogonal is 'yes'; must be True or False"),
    ],
)
def test_bad_input_of_a_draw(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(rt.InvalidInput, match=message):
        ap.Features.draw(*arguments, **options)


def test_bad_input_of_the_map() -> None:
    with pytest.raises(rt.InvalidInput, match=r"x is .* \(2, 9\); must be a floating-point tensor \(..., 8\)"):
        ap.Features.draw(8, 16)(torch.zeros(2, 9))
    with pytest.raises(rt.InvalidInput, match=r"projection is .*; must be a floating-point tensor \(rows, D\)"):
        ap.Features(torch.zeros(8))
