"""Linear attention's kernels, interpreted: against the definition in fp64, with segments short enough for a few in a test."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.recurrent.linear.kernels import call as kernels
from rooftile.recurrent.linear.kernels import gradients as gradient_kernels
from rooftile.recurrent.linear.kernels import outputs, states, tiles
from tests.approximate.tolerance import assert_within, gradients
from tests.grids import swept

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MASKS = [rt.CAUSAL, rt.FULL]
SEGMENT = 64
# T, H, Hk, D, Dv
SIZES = {
    "none": (0, 2, 2, 8, 8),
    "one": (1, 2, 1, 8, 4),
    "segment": (SEGMENT, 1, 1, 24, 16),
    "odd": (SEGMENT + 1, 5, 1, 16, 80),
    "several": (2 * SEGMENT + 31, 2, 2, 80, 16),
    "group": (33, 16, 1, 16, 16),
}


# numpy warns of what a GPU does in silence
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tiles, states, outputs, gradient_kernels, kernels):
        monkeypatch.setattr(module, "SEGMENT", tl.constexpr(SEGMENT))


def inputs(T: int, H: int, Hk: int, D: int, Dv: int, dtype: torch.dtype = torch.float32, B: int = 2) -> list[Tensor]:
    return [torch.randn(B, T, h, d).to(dtype) for h, d in ((H, D), (Hk, D), (Hk, Dv))]


def answer(
    tensors: list[Tensor], state: list[Tensor], dtype: torch.dtype, mask: rt.Mask, path: str, **options
) -> dict[str, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {n: x.to(dtype).requires_grad_() for n, x in zip("qkv", tensors, strict=True)}
    leaves |= {n: x.to(wide).requires_grad_() for n, x in zip("Sz", state, strict=True)}
    q, k, v, *given = leaves.values()
    o, (S, z) = ap.linear_with_state(q, k, v, mask, state=tuple(given), backend=path, **options)
    outputs = {"o": o, "last S": S, "last z": z}
    return outputs | gradients(outputs, leaves, tensors[0].dtype)


GRID = [
    (size, mask, feature, normalise, dtype)
    for size in SIZES for mask in MASKS for feature in ("elu", "relu") for normalise in (True, False) for dtype in DTYPES
]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "mask", "feature", "normalise", "dtype"),
    swept(GRID, lambda case: (case[:2], case[1:4], case[3:], case[1:5:3])),
    ids=str,
)
def test_kernels_equal_the_definition(size: str, mask: rt.Mask, feature: str, normalise: bool, dtype: torch.dtype) -> None:
    T, H, Hk, D, Dv = SIZES[size]
    tensors, state = inputs(T, H, Hk, D, Dv, dtype), [torch.rand(2, Hk, D, Dv), torch.rand(2, Hk, D)]
    options = {"feature": feature, "normalise": normalise}
    found = answer(tensors, state, dtype, mask, "triton", **options)
    exact, plain = (answer(tensors, state, x, mask, "eager", **options) for x in (torch.float64, dtype))
    assert_within(found, exact, plain, dtype, terms=max(T * H // Hk, 64))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_packed_sequences(mask: rt.Mask) -> None:
    lengths = [3, 0, SEGMENT + 7, 1, 2 * SEGMENT, 50]
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    n = len(lengths)
    tensors = [x[0] for x in inputs(sum(lengths), 4, 2, 8, 6, B=1)]
    state = [torch.rand(n, 2, 8, 6), torch.rand(n, 2, 8)]
    found = answer(tensors, state, torch.float32, mask, "triton", cu=cu)
    exact, plain = (answer(tensors, state, x, mask, "eager", cu=cu) for x in (torch.float64, torch.float32))
    assert_within(found, exact, plain, torch.float32, terms=1024)


def test_other_lengths_of_keys_and_strides() -> None:
    q, k, v = torch.randn(2, 70, 4, 8), torch.randn(2, 4, 200, 8).transpose(1, 2), torch.randn(2, 200, 4, 16)[..., ::2]
    torch.testing.assert_close(ap.linear(q, k, v, backend="triton"), ap.linear(q, k, v, backend="eager"), rtol=1e-4, atol=1e-5)
    empty = ap.linear(q, k[:, :0], v[:, :0], backend="triton")
    assert torch.equal(empty, torch.zeros_like(empty))


def test_no_packed_sequence() -> None:
    q, k, v = (torch.empty(0, h, 8) for h in (4, 2, 2))
    none = torch.zeros(1, dtype=torch.int32)
    o, (S, z) = ap.linear_with_state(q, k, v, rt.CAUSAL, cu=none, backend="triton")
    assert (o.shape, S.shape, z.shape) == ((0, 4, 8), (0, 2, 8, 8), (0, 2, 8))


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.sweep)], ids=str)
def test_a_nan_reaches_only_what_sees_it(dtype: torch.dtype, name: str) -> None:
    T, place = SEGMENT + 40, SEGMENT + 13
    tensors = dict(zip("qkv", inputs(T, 4, 2, 16, 16, dtype), strict=True))
    clean = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    tensors[name][1, place, 0, 2] = math.nan
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    do = torch.randn(2, T, 4, 16).to(dtype)
    due, found = (ap.linear(*x.values(), rt.CAUSAL, backend="triton") for x in (clean, leaves))
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
    q, k, v = inputs(SEGMENT + 40, 4, 2, 16, 16, B=3)
    together = ap.linear(q, k, v, rt.CAUSAL, backend="triton")
    assert torch.equal(ap.linear(q, k, v, rt.CAUSAL, backend="triton"), together)
    assert torch.equal(ap.linear(q[:1], k[:1], v[:1], rt.CAUSAL, backend="triton"), together[:1])
    cu = torch.tensor([0, SEGMENT + 40, 2 * SEGMENT + 80], dtype=torch.int32)
    packed = ap.linear(*(x[:2].flatten(0, 1) for x in (q, k, v)), rt.CAUSAL, cu=cu, backend="triton")
    assert torch.equal(packed.unflatten(0, (2, -1)), together[:2])


def test_no_row_knows_later_tokens() -> None:
    q, k, v = inputs(SEGMENT + 40, 4, 2, 16, 16)
    due = ap.linear(q, k, v, rt.CAUSAL, backend="triton")
    for x in (q, k, v):
        x[:, 70:] = 50 * torch.randn_like(x[:, 70:])
    found = ap.linear(q, k, v, rt.CAUSAL, backend="triton")
    assert torch.equal(found[:, :70], due[:, :70])


def test_a_sum_that_fp16_cannot_hold() -> None:
    q = k = torch.full((1, 200, 1, 16), 60.0).half()
    v = torch.randn(1, 200, 1, 16).half()
    found = ap.linear(q, k, v, rt.CAUSAL, backend="triton")
    due = ap.linear(q.double(), k.double(), v.double(), rt.CAUSAL)
    torch.testing.assert_close(found.double(), due, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(1, 4, 2, 8, dtype=torch.float64)] * 3, "cannot run this recurrence: float64; has float32"),
        ([torch.zeros(1, 4, 2, 8)] * 2 + [torch.zeros(1, 4, 2, 256)], "head dims 8, 256; has up to 128"),
    ],
)
def test_the_kernels_refuse_in_words(tensors: list[Tensor], message: str) -> None:
    with pytest.raises(rt.Unsupported, match=message):
        ap.linear(*tensors, rt.CAUSAL, backend="triton")
