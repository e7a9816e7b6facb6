"""Linformer: the projection and exact attention against the definition, known answers, padding, and bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from tests.approximate.tolerance import assert_within, gradients

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# T, S, H, Hk, D, Dv, r, N, heads of e, heads of f (None: e)
SIZES = {
    "one": (1, 1, 1, 1, 8, 8, 1, 1, 1, None),
    "none": (0, 0, 2, 2, 8, 8, 4, 10, 1, None),
    "shared": (37, 50, 4, 4, 16, 8, 8, 64, 1, None),
    "per-head": (37, 37, 4, 4, 16, 16, 8, 37, 4, 4),
    "groups": (65, 70, 10, 2, 16, 16, 16, 70, 2, 1),
    "queries-heads": (20, 30, 16, 1, 16, 16, 5, 33, 16, 1),
}


def inputs(size: str, dtype: torch.dtype) -> dict[str, Tensor]:
    T, S, H, Hk, D, Dv, r, N, heads_e, heads_f = SIZES[size]
    named = {"q": torch.randn(2, T, H, D), "k": torch.randn(2, S, Hk, D), "v": torch.randn(2, S, Hk, Dv)}
    named["e"] = torch.randn(heads_e, r, N) / max(S, 1) ** 0.5
    if heads_f is not None:
        named["f"] = torch.randn(heads_f, r, N) / max(S, 1) ** 0.5
    return {name: x.to(dtype) for name, x in named.items()}


def answer(given: dict[str, Tensor], dtype: torch.dtype, **options) -> dict[str, Tensor]:
    leaves = {name: x.to(dtype).requires_grad_() for name, x in given.items()}
    o = ap.linformer(**leaves, **options)
    assert o.dtype == dtype
    return {"o": o} | gradients({"o": o}, leaves, given["q"].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_projected_attention_equals_the_definition(size: str, padded: bool, dtype: torch.dtype) -> None:
    given = inputs(size, dtype)
    options = {"key_padding_mask": torch.rand(2, given["k"].shape[1]) < 0.3} if padded else {}
    found = answer(given, dtype, **options)
    exact, plain = (answer(given, x, backend="eager", **options) for x in (torch.float64, dtype))
    assert_within(found, exact, plain, dtype)


def test_the_identity_as_projection_is_exact_attention() -> None:
    """Known answer: r = N and E = 1 projects nothing; a shorter text adds rows of zeros, each a key with score 0 and value 0."""
    q, k, v = (torch.randn(2, n, h, 16) for n, h in ((20, 4), (30, 2), (30, 2)))
    torch.testing.assert_close(ap.linformer(q, k, v, torch.eye(30)[None]), rt.attention(q, k, v), rtol=1e-5, atol=1e-5)
    sinks = torch.full((4,), math.log(12.0))
    found = ap.linformer(q, k, v, torch.eye(42)[None])
    torch.testing.assert_close(found, rt.attention(q, k, v, sinks=sinks), rtol=1e-5, atol=1e-5)


def test_a_permutation_as_projection_is_exact_attention() -> None:
    """Known answer: softmax does not know the order of its keys."""
    q, k, v = (torch.randn(2, 30, 4, 16) for _ in range(3))
    order = torch.eye(30)[torch.randperm(30)][None]
    torch.testing.assert_close(ap.linformer(q, k, v, order), rt.attention(q, k, v), rtol=1e-5, atol=1e-5)


def test_means_of_tokens_are_exact_where_tokens_repeat() -> None:
    """Known answer: if every n tokens are the same, projecting to their means is exact attention, as all weights shrink alike."""
    q, k, v = torch.randn(2, 24, 2, 16), *(torch.randn(2, 6, 2, 16).repeat_interleave(4, 1) for _ in range(2))
    means = torch.eye(6).repeat_interleave(4, 1)[None] / 4
    torch.testing.assert_close(ap.linformer(q, k, v, means), rt.attention(q, k, v), rtol=1e-5, atol=1e-5)


def test_one_row_is_the_same_for_all_queries() -> None:
    """Known answer: with r = 1 the softmax has one term, and the output is f v whatever q and k are."""
    q, k, v = (torch.randn(1, 10, 2, 8) for _ in range(3))
    f = torch.randn(1, 1, 10)
    found = ap.linformer(q, k, v, torch.randn(1, 1, 10), f)
    torch.testing.assert_close(found, torch.einsum("rs,bshd->brhd", f[0], v).expand(1, 10, 2, 8))


def test_two_projections_of_keys_and_values_are_not_confused() -> None:
    q, k, v = (torch.randn(1, 12, 2, 8) for _ in range(3))
    e, f = torch.randn(2, 2, 3, 12)
    found = ap.linformer(q, k, v, e, f)
    torch.testing.assert_close(found[:, :, 0], ap.linformer(q[:, :, :1], k[:, :, :1], v[:, :, :1], e[:1], f[:1])[:, :, 0])
    assert not torch.allclose(found, ap.linformer(q, k, v, f, e))


@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_padding_changes_nothing(bad: float) -> None:
    """A padded text equals the text without its end, and what stands in the padding reaches neither o nor a gradient."""
    q, k, v = (torch.randn(2, 20, 2, 8) for _ in range(3))
    e = torch.randn(1, 4, 25)
    padding = torch.arange(20).expand(2, 20) >= 13
    due = ap.linformer(q, k[:, :13], v[:, :13], e)
    k[:, 13:], v[:, 13:] = bad, bad
    leaves = [x.requires_grad_() for x in (q, k, v, e)]
    for backend in ("auto", "eager"):
        found = ap.linformer(*leaves, key_padding_mask=padding, backend=backend)
        torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-5)
        for grad in torch.autograd.grad(found.sum(), leaves):
            assert grad.isfinite().all()


@pytest.mark.parametrize("name", ["tiled", "sdpa"])
def test_the_name_of_a_backend_goes_to_attention(name: str) -> None:
    found = ap.linformer(**inputs("groups", torch.float32), backend=name)
    assert found.shape == (2, 65, 10, 16)


def test_strides_autocast_and_compile() -> None:
    given = inputs("groups", torch.float32)
    due = ap.linformer(**given)
    turned = {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in given.items()}
    torch.testing.assert_close(ap.linformer(**turned), due, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ap.linformer(**given).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_one_graph() -> None:
    torch._dynamo.reset()
    given = inputs("groups", torch.float32)
    compiled = torch.compile(lambda *x: ap.linformer(*x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given.values()), ap.linformer(**given))


_X, _E = torch.zeros(1, 6, 4, 8), torch.zeros(1, 3, 6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mask": rt.CAUSAL}, "mask is causal; Linformer has FULL alone: each projected key is a sum over the whole text"),
        ({"f": rt.CAUSAL}, "mask is causal; Linformer has FULL alone: each projected key is a sum over the whole text"),
        ({"mask": "full"}, "mask is 'full'; Linformer has rooftile.FULL alone"),
        ({"e": _E[..., :5]}, "e projects texts of up to 5 tokens; k has 6: give a wider projection"),
        ({"e": _E[0]}, r"e is .* \(3, 6\); must be a tensor \(heads, r, N\) .* heads one of 1, 4"),
        ({"e": _E.expand(3, 3, 6)}, r"e is .* \(3, 3, 6\); must be .* heads one of 1, 4"),
        ({"e": _E[:, :0]}, "r at least 1"),
        ({"f": _E[:, :2]}, "e has 3 rows and f has 2; they must agree"),
        ({"f": _E.double()}, "f is torch.float64; q is torch.float32"),
        ({"e": None}, "e is None; must be a tensor"),
        ({"key_padding_mask": torch.zeros(1, 6)}, r"key_padding_mask is .*; must be booleans \(B, S\) = \(1, 6\)"),
        ({"scale": "1"}, "scale is '1'; must be a finite number"),
        ({"scale": math.nan}, "scale is nan; must be a finite number"),
        ({"dropout": 0.1}, "linformer has no argument dropout: it has q, k, v, e, f"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence(changed: dict, message: str) -> None:
    with pytest.raises(rt.InvalidInput, match=message):
        ap.linformer(**{"q": _X, "k": _X, "v": _X, "e": _E} | changed)
