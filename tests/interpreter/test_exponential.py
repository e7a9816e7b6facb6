"""Performer's positive features in kernels, interpreted: against the definition in fp64, over a few chunks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.runtime.launch import observe
from tests.approximate.tolerance import assert_within, gradients
from tests.grids import swept

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MASKS = [rt.CAUSAL, rt.FULL]
# T, H, Hk, D, Dv, m
SIZES = {
    "none": (0, 2, 2, 8, 8, 8),
    "one": (1, 2, 1, 8, 4, 6),
    "chunk": (64, 1, 1, 24, 16, 16),
    "odd": (65, 5, 1, 16, 20, 40),
    "several": (160, 2, 2, 40, 16, 70),
    "group": (33, 16, 1, 16, 16, 20),
}

# numpy warns of what a GPU does in silence
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


def inputs(T: int, H: int, Hk: int, D: int, Dv: int, dtype: torch.dtype = torch.float32, B: int = 2) -> list[Tensor]:
    return [torch.randn(B, T, h, d).to(dtype) for h, d in ((H, D), (Hk, D), (Hk, Dv))]


def answer(
    tensors: list[Tensor], state: list[Tensor], dtype: torch.dtype, mask: rt.Mask, features: ap.Features, path: str, **options
) -> dict[str, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {n: x.to(dtype).requires_grad_() for n, x in zip("qkv", tensors, strict=True)}
    leaves |= {n: x.to(wide).requires_grad_() for n, x in zip("Sz", state, strict=False)}
    q, k, v, *given = leaves.values()
    past = (*given, state[2].to(wide))
    o, (S, z, largest) = ap.performer_with_state(q, k, v, mask, features=features, state=past, backend=path, **options)
    outputs = {"o": o, "last S": S, "last z": z}
    return outputs | gradients(outputs, leaves, tensors[0].dtype) | {"largest": largest.detach()}


GRID = [(size, mask, kind, dtype) for size in SIZES for mask in MASKS for kind in ("positive", "hyperbolic") for dtype in DTYPES]


@pytest.mark.parametrize(
    ("size", "mask", "kind", "dtype"), swept(GRID, lambda case: (case[:2], case[1:3], case[2:], case[1:4:2])), ids=str
)
def test_kernels_equal_the_definition(size: str, mask: rt.Mask, kind: str, dtype: torch.dtype) -> None:
    T, H, Hk, D, Dv, m = SIZES[size]
    tensors = inputs(T, H, Hk, D, Dv, dtype)
    # a largest as that of tokens like these
    state = [torch.rand(2, Hk, m, Dv), torch.rand(2, Hk, m) + 0.5, torch.randn(2, Hk)]
    features = ap.Features.draw(D, m, kind=kind, seed=3)
    launched: list[str] = []
    with observe(launched.append):
        found = answer(tensors, state, dtype, mask, features, "triton")
    assert T == 0 or {"_exponential_outputs", "_exponential_keys", "_exponential_values"} <= set(launched)
    exact, plain = (answer(tensors, state, x, mask, features, "eager") for x in (torch.float64, dtype))
    assert_within(found, exact, plain, dtype, terms=max(T * H // Hk, 64))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_packed_sequences(mask: rt.Mask) -> None:
    lengths = [3, 0, 71, 1, 64, 50]
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    n = len(lengths)
    tensors = [x[0] for x in inputs(sum(lengths), 4, 2, 8, 6, B=1)]
    state = [torch.rand(n, 2, 16, 6), torch.rand(n, 2, 16) + 0.5, torch.randn(n, 2)]
    features = ap.Features.draw(8, 16)
    found = answer(tensors, state, torch.float32, mask, features, "triton", cu=cu)
    exact, plain = (answer(tensors, state, x, mask, features, "eager", cu=cu) for x in (torch.float64, torch.float32))
    assert_within(found, exact, plain, torch.float32, terms=256)


def test_no_state_strides_and_other_lengths_of_keys() -> None:
    q, k, v = torch.randn(2, 70, 4, 8), torch.randn(2, 4, 150, 8).transpose(1, 2), torch.randn(2, 150, 4, 16)[..., ::2]
    features = ap.Features.draw(8, 24)
    due = ap.performer(q, k, v, features=features, backend="eager")
    torch.testing.assert_close(ap.performer(q, k, v, features=features, backend="triton"), due, rtol=1e-4, atol=1e-5)
    k, v = k[:, :70], v[:, :70]
    due = ap.performer(q, k, v, rt.CAUSAL, features=features, backend="eager")
    torch.testing.assert_close(ap.performer(q, k, v, rt.CAUSAL, features=features, backend="triton"), due, rtol=1e-4, atol=1e-5)
    none = torch.zeros(1, dtype=torch.int32)
    o = ap.performer(q[0, :0], k[0, :0], v[0, :0], rt.CAUSAL, features=features, cu=none, backend="triton")
    assert o.shape == (0, 4, 8)


@pytest.mark.parametrize(
    ("later", "dtype"),
    swept([(later, dtype) for later in (1.0, 30.0, 1e4) for dtype in (torch.float32, torch.bfloat16)], lambda case: case),
    ids=str,
)
def test_no_row_knows_later_tokens(later: float, dtype: torch.dtype) -> None:
    """Keys so long that a largest over the whole text, or chunk, would make all earlier weights zero; every bit must stay."""
    q, k, v = inputs(130, 2, 1, 16, 16, dtype)
    features = ap.Features.draw(16, 40)
    due = ap.performer(q, k, v, rt.CAUSAL, features=features, backend="triton")
    for cut in (1, 30, 64, 101):
        edited = [x.clone() for x in (q, k, v)]
        for x in edited:
            x[:, cut:] = later * torch.randn_like(x[:, cut:])
        found = ap.performer(*edited, rt.CAUSAL, features=features, backend="triton")
        assert torch.equal(found[:, :cut], due[:, :cut])
        assert not torch.equal(found[:, cut:], due[:, cut:])
        assert found.isfinite().all()


def test_long_vectors_overflow_nothing() -> None:
    leaves = [(200 * x).requires_grad_() for x in inputs(84, 2, 2, 16, 16)]
    o = ap.performer(*leaves, rt.CAUSAL, features=ap.Features.draw(16, 32), backend="triton")
    assert o.isfinite().all()
    for grad in torch.autograd.grad(o.sum(), leaves):
        assert grad.isfinite().all()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_nan_reaches_only_what_sees_it(name: str) -> None:
    T, place, features = 140, 77, ap.Features.draw(16, 24)
    tensors = dict(zip("qkv", inputs(T, 4, 2, 16, 16), strict=True))
    clean = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    tensors[name][1, place, 0, 2] = math.nan
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    do = torch.randn(2, T, 4, 16)
    due, found = (ap.performer(*x.values(), rt.CAUSAL, features=features, backend="triton") for x in (clean, leaves))
    lost = torch.zeros_like(due, dtype=torch.bool)
    if name == "q":
        lost[1, place, 0] = True
    else:
        lost[1, place:, :2, slice(None) if name == "k" else 2] = True
    assert torch.equal(found.isnan(), lost)
    assert torch.equal(found[~lost], due[~lost])
    dq, dk, dv = torch.autograd.grad(due, list(clean.values()), do)
    dq_found, dk_found, dv_found = torch.autograd.grad(found, list(leaves.values()), do)
    if name == "q":
        rows, keys = torch.zeros(2, T, 4, dtype=torch.bool), torch.zeros(2, T, 2, dtype=torch.bool)
        rows[1, place, 0], keys[1, : place + 1, 0] = True, True
        for x, y, where in ((dq_found, dq, rows), (dk_found, dk, keys), (dv_found, dv, keys)):
            assert torch.equal(x.isnan().any(-1), where)
            assert torch.equal(x[~where], y[~where])
    else:
        assert torch.equal(dq_found[:, :place], dq[:, :place])
        assert torch.equal(dq_found[0], dq[0])


def test_neighbours_and_repeats_do_not_matter() -> None:
    q, k, v = inputs(100, 4, 2, 16, 16, B=3)
    options = {"features": ap.Features.draw(16, 24), "backend": "triton"}
    together = ap.performer(q, k, v, rt.CAUSAL, **options)
    assert torch.equal(ap.performer(q, k, v, rt.CAUSAL, **options), together)
    assert torch.equal(ap.performer(q[:1], k[:1], v[:1], rt.CAUSAL, **options), together[:1])
    cu = torch.tensor([0, 100, 200], dtype=torch.int32)
    packed = ap.performer(*(x[:2].flatten(0, 1) for x in (q, k, v)), rt.CAUSAL, cu=cu, **options)
    assert torch.equal(packed.unflatten(0, (2, -1)), together[:2])


@pytest.mark.parametrize("cut", [1, 64, 99])
def test_a_state_goes_on_where_it_ended(cut: int) -> None:
    q, k, v = inputs(130, 4, 2, 8, 8)
    options = {"features": ap.Features.draw(8, 16), "backend": "triton"}
    o, last = ap.performer_with_state(q, k, v, rt.CAUSAL, **options)
    first, state = ap.performer_with_state(*(x[:, :cut] for x in (q, k, v)), rt.CAUSAL, **options)
    second, end = ap.performer_with_state(*(x[:, cut:] for x in (q, k, v)), rt.CAUSAL, state=state, **options)
    torch.testing.assert_close(torch.cat((first, second), 1), o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end, last, rtol=1e-4, atol=1e-5)


def test_other_kinds_are_refused_in_words() -> None:
    features = ap.Features.draw(8, 16, kind="trigonometric")
    with pytest.raises(rt.Unsupported, match="features 'wave'; has 'identity', 'relu', 'elu', 'exp'"):
        ap.performer(*inputs(4, 2, 2, 8, 8), features=features, backend="triton")
