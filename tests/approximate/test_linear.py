"""Linear attention: chunks against the definition, known answers, states, packed sequences, and bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.recurrent.linear.by_chunks import CHUNK
from tests.approximate.tolerance import assert_within, gradients
from tests.conformance.watching import watching

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MASKS = [rt.CAUSAL, rt.FULL]
# T, H, Hk, D, Dv
SIZES = {
    "none": (0, 2, 2, 8, 8),
    "one": (1, 2, 1, 8, 4),
    "odd": (37, 5, 1, 16, 8),
    "chunk": (CHUNK, 2, 2, 8, 8),
    "more": (CHUNK + 1, 16, 1, 8, 8),
    "ragged": (2 * CHUNK + 63, 4, 2, 16, 24),
}


def squared(x: Tensor) -> Tensor:
    """A feature map of the caller's own, with more features than dimensions."""
    return torch.cat((x.square(), x.abs()), -1)


def inputs(T: int, H: int, Hk: int, D: int, Dv: int, dtype: torch.dtype = torch.float32, B: int = 2) -> list[Tensor]:
    return [torch.randn(B, T, h, d).to(dtype) for h, d in ((H, D), (Hk, D), (Hk, Dv))]


def answer(tensors: list[Tensor], state: list[Tensor], dtype: torch.dtype, mask: rt.Mask, **options) -> dict[str, Tensor]:
    """Returns o, the last state and all gradients, from inputs in a dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {n: x.to(dtype).requires_grad_() for n, x in zip("qkv", tensors, strict=True)}
    leaves |= {n: x.to(wide).requires_grad_() for n, x in zip("Sz", state, strict=True)}
    q, k, v, *given = leaves.values()
    o, (S, z) = ap.linear_with_state(q, k, v, mask, state=tuple(given), **options)
    assert o.dtype == dtype
    assert S.dtype == z.dtype == wide
    assert o.is_contiguous()
    outputs = {"o": o, "last S": S, "last z": z}
    return outputs | gradients(outputs, leaves, tensors[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalise", [True, False], ids=["normalised", "plain"])
@pytest.mark.parametrize("feature", ["elu", "relu", squared], ids=["elu", "relu", "function"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_chunks_equal_the_definition(size: str, mask: rt.Mask, feature, normalise: bool, dtype: torch.dtype) -> None:
    T, H, Hk, D, Dv = SIZES[size]
    F = 2 * D if feature is squared else D
    tensors = inputs(T, H, Hk, D, Dv, dtype)
    state = [torch.rand(2, Hk, F, Dv), torch.rand(2, Hk, F)]
    options = {"feature": feature, "normalise": normalise}
    found = answer(tensors, state, dtype, mask, backend="tiled", **options)
    exact, plain = (answer(tensors, state, x, mask, backend="eager", **options) for x in (torch.float64, dtype))
    assert_within(found, exact, plain, dtype, terms=max(T * H // Hk, 64))


def test_identity_without_normalising_is_a_product_of_matrices() -> None:
    """Known answer: (q k^T) v, which sums over keys first: q (k^T v)."""
    q, k, v = inputs(150, 2, 2, 8, 8)
    due = torch.einsum("bthd,bshd,bshe->bthe", *(x.double() for x in (q, k, v)))
    found = ap.linear(q, k, v, feature="identity", normalise=False)
    torch.testing.assert_close(found.double(), due, rtol=1e-5, atol=1e-4)


def test_one_hot_keys_read_back_their_values() -> None:
    """Known answer: with orthogonal one-hot keys and identity features, the state is a table, and a query reads its entry."""
    D = 16
    k = torch.eye(D)[None, :, None]
    v = torch.randn(1, D, 1, 5)
    order = torch.randperm(D)
    found = ap.linear(k[:, order], k, v, feature="identity")
    assert torch.equal(found, v[:, order])


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_equal_keys_average_their_values(mask: rt.Mask) -> None:
    """Known answer: where all keys are one vector every weight is the same, so a row is the mean of the values it sees."""
    q, _, v = inputs(200, 4, 2, 8, 8)
    found = ap.linear(q, torch.randn(8).expand(2, 200, 2, 8), v, mask)
    means = v.cumsum(1) / torch.arange(1, 201)[:, None, None] if mask == rt.CAUSAL else v.mean(1, keepdim=True).expand_as(v)
    torch.testing.assert_close(found, means.repeat_interleave(2, 2), rtol=1e-5, atol=1e-5)


def test_constant_values_come_back() -> None:
    """Known answer: weights sum to one, whatever the queries and keys are."""
    q, k, v = inputs(300, 4, 2, 8, 8)
    found = ap.linear(5 * q, 5 * k, v[:, :1].expand(-1, 300, -1, -1), rt.CAUSAL)
    torch.testing.assert_close(found, v[:, :1].expand(-1, 300, -1, -1).repeat_interleave(2, 2), rtol=1e-5, atol=1e-5)


def test_an_exponential_feature_of_one_dimension_is_softmax() -> None:
    """Known answer: with D = 1 and keys of 0 or 1, exp(q k) = 1 + (e^q - 1) k is linear attention: exact attention's rows."""
    q, v = torch.randn(1, 140, 2, 1), torch.randn(1, 140, 2, 4)
    k = torch.randint(0, 2, (1, 140, 2, 1)).float()
    f_q, f_k = torch.cat((torch.ones_like(q), q.exp() - 1), -1), torch.cat((torch.ones_like(k), k), -1)
    found = ap.linear(f_q, f_k, v, rt.CAUSAL, feature="identity")
    torch.testing.assert_close(found, rt.attention(q, k, v, rt.CAUSAL, scale=1.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", [1e-3, 7.0])
def test_relu_features_ignore_the_length_of_queries_and_keys(factor: float) -> None:
    """Known answer: relu is homogeneous, so a scale cancels; that of queries does for any feature map of degree one."""
    q, k, v = inputs(100, 2, 2, 8, 8)
    due = ap.linear(q, k, v, rt.CAUSAL, feature="relu")
    torch.testing.assert_close(ap.linear(q * factor, k * factor, v, rt.CAUSAL, feature="relu"), due, rtol=1e-4, atol=1e-5)


def test_rows_whose_weights_are_all_zero_are_zero_with_zero_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(50, 2, 2, 8, 8))
    keys = -k.abs()
    o = ap.linear(q, keys, v, rt.CAUSAL, feature="relu")
    assert torch.equal(o, torch.zeros_like(o))
    for grad in torch.autograd.grad(o.sum(), (q, k, v)):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("path", ["tiled", "eager"])
@pytest.mark.parametrize("feature", ["elu", "relu"])
@pytest.mark.parametrize("cut", [1, CHUNK, 170])
def test_a_state_goes_on_where_it_ended(cut: int, feature: str, path: str) -> None:
    """Two calls, joined by the state, are one; gradients flow through the state."""
    leaves = [x.double().requires_grad_() for x in inputs(200, 4, 2, 8, 8)]
    options = {"feature": feature, "backend": path}
    o, (S, z) = ap.linear_with_state(*leaves, rt.CAUSAL, **options)
    first, state = ap.linear_with_state(*(x[:, :cut] for x in leaves), rt.CAUSAL, **options)
    second, last = ap.linear_with_state(*(x[:, cut:] for x in leaves), rt.CAUSAL, state=state, **options)
    torch.testing.assert_close(torch.cat((first, second), 1), o)
    torch.testing.assert_close(last, (S, z))
    incoming = torch.randn_like(o)
    due = torch.autograd.grad(o, leaves, incoming, retain_graph=True)
    for x, y in zip(torch.autograd.grad(torch.cat((first, second), 1), leaves, incoming), due, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("feature", ["elu", "relu", squared], ids=["elu", "relu", "function"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_give_the_rows_of_the_whole(dtype: torch.dtype, feature, normalise: bool) -> None:
    q, k, v = inputs(40, 4, 2, 8, 6, dtype)
    whole, (S, z) = ap.linear_with_state(q, k, v, rt.CAUSAL, feature=feature, normalise=normalise)
    _, state = ap.linear_with_state(*(x[:, :0] for x in (q, k, v)), rt.CAUSAL, feature=feature)
    addresses = [x.data_ptr() for x in state]
    steps = [
        ap.linear_step(*(x[:, t : t + 1] for x in (q, k, v)), state, feature=feature, normalise=normalise) for t in range(40)
    ]
    assert [x.data_ptr() for x in state] == addresses
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)
    torch.testing.assert_close(state, (S, z), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", ["tiled", "eager"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_packed_sequences_are_computed_each_by_itself(mask: rt.Mask, path: str) -> None:
    lengths = [3, 0, CHUNK + 7, 1, 50]
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    leaves = [x[0].double().requires_grad_() for x in inputs(sum(lengths), 4, 2, 8, 6, B=1)]
    given = [torch.rand(5, 2, 8, 6, dtype=torch.float64), torch.rand(5, 2, 8, dtype=torch.float64)]
    for x in given:
        x.requires_grad_()
    o, (S, z) = ap.linear_with_state(*leaves, mask, cu=cu, state=tuple(given), backend=path)
    due = [
        ap.linear_with_state(*(x[None, cu[b] : cu[b + 1]] for x in leaves), mask, state=tuple(x[b : b + 1] for x in given))
        for b in range(5)
    ]
    torch.testing.assert_close(o, torch.cat([x[0] for x, _ in due]))
    torch.testing.assert_close(S, torch.cat([x for _, (x, _) in due]))
    torch.testing.assert_close(z, torch.cat([x for _, (_, x) in due]))
    incoming = [torch.randn_like(x) for x in (o, S)]
    found = torch.autograd.grad([o, S], [*leaves, *given], incoming)
    parts = [torch.cat([x[0] for x, _ in due]), torch.cat([x for _, (x, _) in due])]
    for x, y in zip(found, torch.autograd.grad(parts, [*leaves, *given], incoming), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("path", ["tiled", "eager"])
def test_no_packed_sequence(path: str) -> None:
    q, k, v = (torch.empty(0, h, 8) for h in (4, 2, 2))
    o, (S, z) = ap.linear_with_state(q, k, v, rt.CAUSAL, cu=torch.zeros(1, dtype=torch.int32), backend=path)
    assert (o.shape, S.shape, z.shape) == ((0, 4, 8), (0, 2, 8, 8), (0, 2, 8))


def test_other_lengths_of_keys_without_a_mask() -> None:
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 200, 2, 8), torch.randn(2, 200, 2, 8)
    torch.testing.assert_close(ap.linear(q, k, v, backend="tiled"), ap.linear(q, k, v, backend="eager"))
    empty = ap.linear(q, k[:, :0], v[:, :0])
    assert torch.equal(empty, torch.zeros_like(empty))


@pytest.mark.parametrize("path", ["tiled", "eager"])
def test_gradients_against_finite_differences(path: str) -> None:
    leaves = [x.double().requires_grad_() for x in inputs(5, 4, 2, 3, 2, B=1)]
    for mask in MASKS:
        assert torch.autograd.gradcheck(lambda *x, mask=mask: ap.linear(*x, mask, backend=path), leaves)


def test_large_numbers_are_summed_in_fp32() -> None:
    """Sums beyond fp16's largest number, and exponentials below its smallest."""
    q, k, v = (100 * x for x in inputs(1000, 2, 2, 16, 16))
    for dtype in DTYPES:
        options = {"mask": rt.CAUSAL, "normalise": True}
        tensors = [x.to(dtype) for x in (q, k, v)]
        found = ap.linear(*tensors, backend="tiled", **options)
        exact, plain = (ap.linear(*(x.to(y) for x in tensors), backend="eager", **options) for y in (torch.float64, dtype))
        assert_within({"o": found}, {"o": exact}, {"o": plain}, dtype)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("T", [50, CHUNK + 40])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_reaches_its_own_row_and_later_ones(bad: float, T: int, name: str) -> None:
    """In the forward, in the gradient of queries, and in the state that is returned."""
    tensors = dict(zip("qkv", inputs(T, 4, 2, 8, 6), strict=True))
    clean = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    place = T - 15
    tensors[name][1, place, 0, 2] = bad
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    results = []
    for given in (clean, leaves):
        o, (S, _) = ap.linear_with_state(*given.values(), rt.CAUSAL)
        (dq,) = torch.autograd.grad(o[:, :place].sum(), given["q"], retain_graph=True)
        results.append((o, dq, S))
    (o, dq, S), (found, dq_found, S_found) = results
    lost = torch.zeros_like(o, dtype=torch.bool)
    # heads 0 and 1 have key head 0
    lost[1, place:, :2, slice(None) if name == "k" else 2] = True
    assert torch.equal(found.isnan(), lost)
    torch.testing.assert_close(found[~lost], o[~lost], rtol=0, atol=0)
    torch.testing.assert_close(dq_found[:, :place], dq[:, :place], rtol=0, atol=0)
    assert S_found[1, 0].isnan().any()
    assert not S_found[0].isnan().any()
    assert not S_found[:, 1].isnan().any()


@pytest.mark.parametrize("name", ["q", "do"])
def test_a_nan_of_a_query_reaches_its_own_and_earlier_keys(name: str) -> None:
    T, place = CHUNK + 40, CHUNK + 20
    q, k, v = inputs(T, 4, 2, 8, 6)
    do = torch.randn(2, T, 4, 6)
    {"q": q, "do": do}[name][1, place, 0, 2] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = ap.linear(*leaves, rt.CAUSAL)
    dq, dk, dv = torch.autograd.grad(o, leaves, do)
    rows, keys = torch.zeros(2, T, 4, dtype=torch.bool), torch.zeros(2, T, 2, dtype=torch.bool)
    rows[1, place, 0] = True
    keys[1, : place + 1, 0] = True
    assert torch.equal(dq.isnan().any(-1), rows)
    for x in (dk, dv):
        assert torch.equal(x.isnan().any(-1), keys)


def test_strides_of_any_kind() -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(150, 4, 2, 8, 8))
    due = ap.linear(*(x.contiguous() for x in (q, k, v)), rt.CAUSAL)
    assert torch.equal(ap.linear(q, k, v, rt.CAUSAL), due)
    wide = [torch.cat((x, x), -1)[..., ::2] for x in (q, k, v)]
    assert torch.equal(ap.linear(*wide, rt.CAUSAL), ap.linear(*(x.contiguous() for x in wide), rt.CAUSAL))
    one = q[:, :1].expand(-1, 150, -1, -1)
    assert torch.equal(ap.linear(one, k, v, rt.CAUSAL), ap.linear(one.contiguous(), k, v, rt.CAUSAL))


def test_neighbours_in_the_batch_do_not_matter() -> None:
    q, k, v = inputs(150, 4, 2, 8, 8, B=3)
    together = ap.linear(q, k, v, rt.CAUSAL, deterministic=True)
    again = ap.linear(q, k, v, rt.CAUSAL, deterministic=True)
    assert torch.equal(together, again)
    others = [torch.cat((x[:1], torch.randn_like(x[1:])), 0) for x in (q, k, v)]
    assert torch.equal(ap.linear(*others, rt.CAUSAL, deterministic=True)[0], together[0])


def test_autocast_and_inference_mode() -> None:
    q, k, v = inputs(40, 4, 2, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ap.linear(q, k, v, rt.CAUSAL)
    assert torch.equal(found, ap.linear(*(x.bfloat16() for x in (q, k, v)), rt.CAUSAL))
    with torch.inference_mode():
        assert torch.equal(ap.linear(q, k, v, rt.CAUSAL), ap.linear(q, k, v, rt.CAUSAL, backend="tiled"))


def test_transforms_of_torch_func() -> None:
    q, k, v = (x.double() for x in inputs(CHUNK + 20, 4, 2, 8, 8))
    incoming = torch.randn(2, CHUNK + 20, 4, 8, dtype=torch.float64)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (ap.linear(q, k, v, rt.CAUSAL) * incoming).sum()

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    due = torch.autograd.grad(loss(*leaves), leaves)
    for x, y in zip(torch.func.grad(loss, (0, 1, 2))(q, k, v), due, strict=True):
        torch.testing.assert_close(x, y)
    mapped = torch.func.vmap(lambda q, k, v: ap.linear(q[None], k[None], v[None], rt.CAUSAL)[0])(q, k, v)
    torch.testing.assert_close(mapped, ap.linear(q, k, v, rt.CAUSAL))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_one_graph_that_the_compiler_keeps_for_other_lengths() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, (S, _) = ap.linear_with_state(q * 2, k, v, rt.CAUSAL)
        return o.sum() + S.sum()

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (30, 55):
        leaves = [x.requires_grad_() for x in inputs(T, 4, 2, 8, 8)]
        found, due = compiled(*leaves), program(*leaves)
        torch.testing.assert_close(found, due)
        for x, y in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(due, leaves), strict=True):
            torch.testing.assert_close(x, y)


def test_a_mode_sees_one_operator_each_way() -> None:
    leaves = [x.requires_grad_() for x in inputs(40, 4, 2, 8, 8)]
    with watching() as watch:
        ap.linear(*leaves, rt.CAUSAL).sum().backward()
    assert [call.name for call in watch.calls] == ["chunked_recurrence", "chunked_recurrence_backward"]


def test_gradients_of_gradients_are_refused_in_chunks_and_given_by_the_definition() -> None:
    leaves = [x.double().requires_grad_() for x in inputs(6, 2, 2, 3, 2)]
    (dq,) = torch.autograd.grad(ap.linear(*leaves, rt.CAUSAL).square().sum(), leaves[0], create_graph=True)
    with pytest.raises(rt.Unsupported, match="double backward through linear attention in chunks; backend='eager' has it"):
        dq.sum().backward()
    (dq,) = torch.autograd.grad(ap.linear(*leaves, rt.CAUSAL, backend="eager").square().sum(), leaves[0], create_graph=True)
    dq.sum().backward()
    assert leaves[1].grad.abs().sum() > 0


_Q, _K = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8)
_STATE = (torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mask": rt.Window(4)}, "mask is .*; linear attention has FULL and CAUSAL"),
        ({"mask": "causal"}, "mask is 'causal'; must be rooftile.FULL or rooftile.CAUSAL"),
        ({"k": _K[:, :3], "v": _K[:, :3], "mask": rt.CAUSAL}, "k has length 3; q has 4, and under CAUSAL they must agree"),
        ({"feature": "cosine"}, "feature is 'cosine'; must be 'elu', 'relu', 'identity' or a function"),
        ({"feature": lambda x: x[:, :2]}, r"feature\(q\) is \(1, 2, 2, 8\); q is \(1, 4, 2, 8\)"),
        ({"feature": lambda x: x[..., : x.shape[2]]}, None),
        ({"normalise": 1}, "normalise is 1; must be True or False"),
        ({"return_state": True}, r"linear has no argument return_state: call linear_with_state, which returns \(o, \(S, z\)\)"),
        ({"backend": "hopper"}, "backend is 'hopper'; must be 'auto', 'triton', 'tiled' or 'eager'"),
        ({"deterministic": 1}, "deterministic is 1; must be True, False, or None"),
        ({"state": _STATE[0]}, r"state is a .*; must be the tensors \(S, z\) that the function with _with_state returns"),
        ({"state": (_STATE[0].bfloat16(), _STATE[1])}, r"S of state is a torch.bfloat16 tensor .*; must be a torch.float32"),
        ({"state": (_STATE[0], _STATE[1][..., :4])}, r"z of state is .* \(1, 2, 4\); must be .* \(1, 2, 8\)"),
        ({"k": _K[..., :4]}, "k has head dim 4; q has 8"),
        ({"k": _K.double()}, "k is torch.float64; q is torch.float32"),
        ({"cu": torch.tensor([0, 4], dtype=torch.int32)}, r"q is \(1, 4, 2, 8\); must have 3 axes \(total, H, D\)"),
        ({"dropout": 0.1}, "linear has no argument dropout: it has q, k, v, mask"),
        ({"bias": None}, "linear has no argument bias: it has q, k, v, mask"),
        ({"is_causal": True}, "linear has no argument is_causal: write mask=rooftile.CAUSAL"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence(changed: dict, message: str | None) -> None:
    call = {"q": _Q, "k": _K, "v": _K} | changed
    if message is None:
        assert ap.linear(**call).shape == _Q.shape
        return
    with pytest.raises(rt.InvalidInput, match=message):
        ap.linear(**call)


def test_bad_input_of_a_step() -> None:
    with pytest.raises(rt.InvalidInput, match="q has length 4 and k has 4; a step takes one token"):
        ap.linear_step(_Q, _K, _K, _STATE)
    with pytest.raises(rt.Unsupported, match="linear_step has no gradient, and an input requires one"):
        ap.linear_step(_Q[:, :1].clone().requires_grad_(), _K[:, :1], _K[:, :1], _STATE)
    with pytest.raises(rt.InvalidInput, match=r"cu ends at 3; must end at 4"):
        ap.linear(_Q[0], _K[0], _K[0], cu=torch.tensor([0, 3], dtype=torch.int32))


@pytest.mark.parametrize("method", ["linear", "performer"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_state_has_the_dtype_that_the_docs_say(method: str, dtype: torch.dtype) -> None:
    """float32, and float64 for float64 inputs: what is returned can be given, and another dtype is refused."""
    q, k, v = (torch.randn(1, 40, 2, 8).to(dtype) for _ in range(3))
    words = {} if method == "linear" else {"features": ap.Features.draw(8, 16, seed=0)}
    call, with_state = getattr(ap, method), getattr(ap, f"{method}_with_state")
    due = torch.float64 if dtype == torch.float64 else torch.float32
    whole = call(q, k, v, rt.CAUSAL, **words)
    o, state = with_state(q[:, :25], k[:, :25], v[:, :25], rt.CAUSAL, **words)
    assert {x.dtype for x in state} == {due}
    rest, _ = with_state(q[:, 25:], k[:, 25:], v[:, 25:], rt.CAUSAL, state=state, **words)
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(torch.cat([o, rest], 1), whole, rtol=tolerance, atol=tolerance)
    if method == "linear":
        again = tuple(x.clone() for x in state)
        found = ap.linear_step(q[:, 25:26], k[:, 25:26], v[:, 25:26], again)
        torch.testing.assert_close(found, whole[:, 25:26], rtol=tolerance, atol=tolerance)
    other = tuple(x.to(torch.float32 if due == torch.float64 else torch.float64) for x in state)
    with pytest.raises(rt.InvalidInput, match=rf"S of state is .*; must be a {due} tensor .*, for inputs in {dtype}"):
        call(q, k, v, rt.CAUSAL, state=other, **words)
