"""Kernels of fused operations with gradients, interpreted, by their formulas in fp64."""

from __future__ import annotations

import pytest
import torch

from rooftile import fused
from rooftile.runtime import launch
from tests.conformance.fused_cases import (
    DTYPES,
    OFFSETS,
    OPERATIONS,
    WITH_OFFSETS,
    add_offset,
    answers,
    check,
    inputs,
    losses,
)

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    for rows, size in ((5, 40), (1, 1), (0, 16), (2, 1000)):
        seen: list[str] = []
        leaves = inputs(name, rows, size, dtype)
        with launch.observe(seen.append):
            answers(OPERATIONS[name].call, leaves)
        assert len(seen) >= 2 or not rows
        check(name, leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", WITH_OFFSETS)
def test_rows_that_share_an_offset(name: str, offset: float, dtype: torch.dtype) -> None:
    for size in (40, 5000):
        leaves = inputs(name, 3, size, dtype)
        add_offset(leaves[0], offset)
        check(name, leaves)


def test_parts_of_dw_are_added_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftile.fused.kernels import norm_gradients

    monkeypatch.setattr(norm_gradients, "PROGRAMS", 3)
    for name in ("rms norm", "add, layer norm"):
        check(name, inputs(name, 11, 33, torch.float32))
    # more parts than the second kernel adds at once
    monkeypatch.setattr(norm_gradients, "PARTS", 2)
    norm_gradients.constants_of_adding.cache_clear()
    check("layer norm", inputs("layer norm", 11, 33, torch.float32))
    norm_gradients.constants_of_adding.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in OPERATIONS if "norm" in name and "gated" not in name])
def test_rows_of_norms_that_a_program_reads_in_pieces(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftile.fused.kernels import norm, norm_gradients

    rows = {"WHOLE": 16, "LONG_PIECE": 16}
    for module, sizes in ((norm, rows), (norm_gradients, rows | {"LONG_COLUMNS": 8, "PROGRAMS": 5})):
        for word, size in sizes.items():
            monkeypatch.setattr(module, word, size)
        module.long_constants.cache_clear()
    try:
        for rows, size in ((5, 40), (1, 17), (13, 33)):
            seen: list[str] = []
            leaves = inputs(name, rows, size, dtype)
            with launch.observe(seen.append):
                answers(OPERATIONS[name].call, leaves)
            assert seen == ["_normalise_long", "_long_sums", "_long_gradients", "_add_parts"]
            check(name, leaves)
    finally:
        norm.long_constants.cache_clear()
        norm_gradients.long_constants.cache_clear()


def test_long_rows_of_norms() -> None:
    for name in ("add, layer norm", "rms norm"):
        check(name, inputs(name, 3, 33001, torch.bfloat16))


def test_a_sum_and_its_norm_are_one_launch() -> None:
    x, stream, w = torch.randn(3, 40), torch.randn(3, 40), torch.ones(40)
    before, seen = stream.clone(), []
    with launch.observe(seen.append):
        y, total = fused.add_rms_norm(x, stream, w)
    assert seen == ["_normalise"]
    assert torch.equal(total, x + stream)
    assert torch.equal(stream, before)
    torch.testing.assert_close(y, fused.rms_norm(total, w))


def test_gates_far_from_zero() -> None:
    gate = torch.tensor([[-1e4, -90.0, -30.0, 0.0, 30.0, 90.0, 1e4, torch.nan]], requires_grad=True)
    up = torch.full_like(gate, 2.0).detach().requires_grad_()
    for call in (fused.swiglu, fused.geglu, lambda g, u: fused.geglu(g, u, tanh=False)):
        dgate, dup = torch.autograd.grad(call(gate, up).sum(), (gate, up))
        assert dgate[0, :7].tolist() == pytest.approx([0, 0, 0, 1, 2, 2, 2], abs=1e-6)
        assert dup[0, :7].tolist() == pytest.approx([0, 0, 0, 0, 30, 90, 1e4], abs=1e-6)
        assert dup[0, 7].isnan()


def test_rows_of_softmax_that_are_lost() -> None:
    x = torch.randn(4, 50)
    x[0], x[1, 3], x[2, 4] = -torch.inf, torch.nan, -torch.inf
    found = fused.softmax(x)
    assert found[:2].isnan().all()
    torch.testing.assert_close(found[2:], x[2:].softmax(-1))


@pytest.mark.parametrize("size", [20000, 33000, 70001])
def test_rows_of_softmax_that_a_program_reads_in_pieces(size: int) -> None:
    x = 4 * torch.randn(6, size)
    # in the first piece, in a later one, in a lane that has seen no number before, at the end
    x[1], x[2, 9000], x[3, :8192], x[4, 8192:] = -torch.inf, torch.nan, -torch.inf, -torch.inf
    x[5, -1] = 80.0
    x[3, 8192 + 7] = torch.nan
    x.requires_grad_()
    dy = torch.randn(6, size)
    found = fused.softmax(x, 0.5)
    (dx,) = torch.autograd.grad(found, x, dy)
    exact = x.detach().double().requires_grad_()
    due = (0.5 * exact).softmax(-1)
    (due_dx,) = torch.autograd.grad(due, exact, dy.double())
    assert found[1:4].isnan().all()
    for rows in (0, 4, 5):
        torch.testing.assert_close(found[rows].double(), due[rows], atol=1e-9, rtol=1e-5)
        torch.testing.assert_close(dx[rows].double(), due_dx[rows], atol=1e-9, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [1, 50, 5000])
def test_cross_entropy(V: int, dtype: torch.dtype) -> None:
    wide = (torch.randn(5, V + 3) * 4).to(dtype)
    target = torch.randint(V, (5,))
    target[1] = -100
    upstream = torch.randn(5)
    for smoothing, softcap, z_loss in ((0.0, None, 0.0), (0.1, 3.0, 0.01)):
        x = wide[:, :V].detach().requires_grad_()
        words = {"label_smoothing": smoothing, "softcap": softcap, "z_loss": z_loss, "reduction": "none"}
        found = fused.cross_entropy(x, target, **words)
        exact = x.detach().double().requires_grad_()
        due = losses(exact, target, smoothing, softcap, z_loss)
        torch.testing.assert_close(found.double(), due, rtol=1e-5, atol=2e-5)
        (dx,), (expected,) = torch.autograd.grad(found, x, upstream), torch.autograd.grad(due, exact, upstream.double())
        torch.testing.assert_close(dx.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_cross_entropy_writes_over_its_logits(reduction: str) -> None:
    x, w, target = torch.randn(9, 8), torch.randn(77, 8), torch.randint(77, (9,))
    target[4] = -100
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    due_leaves = [t.clone().requires_grad_() for t in (x, w)]
    found = fused.linear_cross_entropy(*leaves, target, reduction=reduction)
    due = torch.nn.functional.cross_entropy(due_leaves[0] @ due_leaves[1].T, target, reduction=reduction)
    torch.testing.assert_close(found, due)
    for a, b in zip(*(torch.autograd.grad(y.sum(), t) for y, t in ((found, leaves), (due, due_leaves))), strict=True):
        torch.testing.assert_close(a, b)


def test_logits_of_minus_infinity_and_targets_outside() -> None:
    x = torch.randn(4, 5000)
    x[0, :4999], x[1, 7], x[2] = -torch.inf, -torch.inf, -torch.inf
    target = torch.tensor([4999, 3, 0, 1])
    found = fused.cross_entropy(x, target, reduction="none")
    assert found[0] == 0
    torch.testing.assert_close(found[1], torch.nn.functional.cross_entropy(x[1:2], target[1:2]))
    assert found[2].isnan()
    from rooftile.fused.kernels import cross_entropy

    outside, _ = cross_entropy.forward(x, torch.tensor([5000, -1, 0, 1]), -100, 0.0, 0.0, 0.0)
    assert outside[:2].isnan().all()
    assert outside[3].isfinite()


def test_the_gradient_of_a_part_of_the_vocabulary() -> None:
    """A target may be in another part, in none, or ignored; the smoothing of a logit is a share of the whole vocabulary."""
    from rooftile.fused.kernels import cross_entropy
    from rooftile.fused.loss import ELSEWHERE, gradients

    x, upstream = torch.randn(4, 5000), torch.randn(4)
    sums = torch.stack([x.amax(-1) + 1.0, torch.full((4,), 9.0)], -1)
    place = torch.tensor([4999, ELSEWHERE, -2, -3])
    for numbers in ((0.0, 0.0, 0.0), (0.3, 2.0, 0.1)):
        found = cross_entropy.gradient(upstream, sums, x, place, -3, *numbers, whole=12_345)
        (due,) = gradients(upstream, None, sums, x, place, -3, *numbers, whole=12_345)
        torch.testing.assert_close(found, due, equal_nan=True)
        assert found[2].isnan().all()
        assert not found[3].any()


def test_hidden_states() -> None:
    x, w = torch.randn(7, 16, requires_grad=True), torch.randn(37, 16, requires_grad=True)
    target = torch.randint(37, (7,))
    found = torch.autograd.grad(fused.linear_cross_entropy(x, w, target), (x, w))
    due = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ w.T, target), (x, w))
    for a, b in zip(found, due, strict=True):
        torch.testing.assert_close(a, b)
