"""HSTU attention: against pairs in Python and the definition in fp64, in plain operations and in Triton's interpreter."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import rooftile as rt
from rooftile.recommend import RelativeBias, hstu_attention, time_edges
from tests.recommend.hstu_cases import D64, LENGTHS, MASKS, Case, by_pairs, case

# the interpreter runs the same tests
BACKEND = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "tiled"
TARGETS = (2, 0, 1, 5, 40)
ERRORS = {D64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = [(0, None), (1, None), (2, TARGETS), (0, TARGETS)]


def fits(mask: str, contextual: int, targets: tuple[int, ...] | None, bias: bool, **more: Any) -> Case:
    """A case whose shortest user has room for its contextual rows and targets."""
    lengths = tuple(n + contextual * (n > 0) for n in LENGTHS)
    return case(mask, contextual, targets, bias, lengths=lengths, **more)


def gradients(given: Case, backend: str, dy: Tensor) -> tuple[Tensor, ...]:
    y = given.run(backend)
    return (y, *torch.autograd.grad(y, given.leaves, dy.to(y.dtype)))


def assert_near(found: tuple[Tensor, ...], exact: tuple[Tensor, ...], error: float) -> None:
    for n, (x, due) in enumerate(zip(found, exact, strict=True)):
        worst = (x.double() - due.double()).abs().max().item()
        assert worst <= error * max(due.abs().max().item(), 1e-3), (n, worst)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("contextual", "targets"), SHAPES)
@pytest.mark.parametrize("mask", MASKS)
def test_the_definition_is_the_sum_over_pairs(mask: str, contextual: int, targets: tuple[int, ...] | None, bias: bool) -> None:
    small = None if targets is None else tuple(min(n, 3) for n in targets)
    given = case(mask, contextual, small, bias, lengths=tuple(n + contextual * (n > 0) for n in (5, 0, 1, 12)), zero=4)
    if small is not None:
        given.words["targets"] = given.words["targets"][:4]
    torch.testing.assert_close(given.run("eager"), by_pairs(given), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [D64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("contextual", "targets"), SHAPES)
@pytest.mark.parametrize("mask", MASKS)
def test_outputs_and_gradients(
    mask: str, contextual: int, targets: tuple[int, ...] | None, bias: bool, dtype: torch.dtype
) -> None:
    check_outputs_and_gradients(mask, contextual, targets, bias, dtype)


def check_outputs_and_gradients(
    mask: str, contextual: int, targets: tuple[int, ...] | None, bias: bool, dtype: torch.dtype
) -> None:
    given = fits(mask, contextual, targets, bias).to(dtype)
    exact = given.to(D64)
    dy = torch.randn(exact.v.shape, dtype=D64).to(dtype)
    assert_near(gradients(given, BACKEND, dy), gradients(exact, "eager", dy.double()), ERRORS[dtype])


@pytest.mark.parametrize(("D", "Dv"), [(32, 32), (64, 128), (17, 5), (160, 96)])
def test_head_dims_and_strides(D: int, Dv: int) -> None:
    given = case("causal", 2, (1, 0, 0, 5, 40), True, lengths=(5, 0, 3, 40, 70), H=3, D=D, Dv=Dv, zero=3, scale=0.125)
    exact = gradients(given, "eager", dy := torch.randn_like(given.v))
    q, k, v = (x.detach().float().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in given[:3])
    wide = given.to(torch.float32)
    assert_near(gradients(Case(q, k, v, given.cu, wide.words), BACKEND, dy), exact, 1e-5)
    columns = [x.detach().float().permute(0, 2, 1).contiguous().permute(0, 2, 1).requires_grad_() for x in given[:3]]
    assert_near(gradients(Case(*columns, given.cu, wide.words), BACKEND, dy), exact, 1e-5)


def test_many_users_of_all_lengths() -> None:
    lengths = (*tuple(int(n) for n in torch.randint(0, 30, (60,))), 300)
    given = case("causal", lengths=lengths, D=16).to(torch.float32)
    dy = torch.randn(given.v.shape)
    assert_near(gradients(given, BACKEND, dy), gradients(given.to(D64), "eager", dy.double()), 1e-5)


def test_small_scores_give_half_of_linear_attention() -> None:
    """silu(x) is x / 2 for small x."""
    given = case("causal", lengths=(100,), scale=1.0)
    found = given._replace(words=given.words | {"alpha": 1e-9}).run(BACKEND if BACKEND == "tiled" else "eager")
    products = torch.einsum("ihd,jhd->hij", given.q, given.k).tril()
    torch.testing.assert_close(found, 0.5e-9 * torch.einsum("hij,jhd->ihd", products, given.v), rtol=1e-4, atol=1e-15)


def test_a_bad_target_reaches_no_other() -> None:
    """NaN in one target, in its query, key and value: its own row is NaN, and nothing else, in gradients as well."""
    given = case("causal", 2, (0, 10), lengths=(30, 70)).to(torch.float32)
    clean = gradients(given, BACKEND, dy := torch.randn(given.v.shape))
    bad = 100 - 7
    q, k, v = (x.detach().clone() for x in given[:3])
    q[bad], k[bad], v[bad] = torch.nan, torch.nan, torch.inf
    spoiled = given._replace(q=q.requires_grad_(), k=k.requires_grad_(), v=v.requires_grad_())
    y, dq, dk, dv = gradients(spoiled, BACKEND, dy)
    others = torch.arange(100) != bad
    assert y[bad].isnan().all()
    for found, due in ((y, clean[0]), (dq, clean[1])):
        assert torch.equal(found[others], due[others])
    # the history is seen by the bad row; the other targets and the other user are not
    apart = others & ((torch.arange(100) >= 90) | (torch.arange(100) < 30))
    for found, due in ((dk, clean[2]), (dv, clean[3])):
        assert torch.equal(found[apart], due[apart])


def test_targets_of_the_mask() -> None:
    given = case("window", 2, None, True, lengths=(0, 9, 30)).to(torch.float32)
    due = given._replace(words=given.words | {"targets": 4}).run(BACKEND)
    mask = given.words["mask"] & rt.Targets(4)
    for words in ({"mask": mask}, {"mask": mask, "targets": 4}):
        assert torch.equal(given._replace(words=given.words | words).run(BACKEND), due)
    for targets in (3, torch.tensor([0, 4, 4])):
        with pytest.raises(rt.InvalidInput, match=r"mask is .*Targets\(4\) and targets is .*; must be the same number"):
            given._replace(words=given.words | {"mask": mask, "targets": targets}).run(BACKEND)


def test_a_user_does_not_depend_on_its_neighbours() -> None:
    given = case("causal", lengths=(20, 60, 20)).to(torch.float32)
    y = given.run(BACKEND)
    q, k, v = (x.detach().clone() for x in given[:3])
    for x in (q, k, v):
        x[:20], x[80:] = torch.nan, torch.inf
    changed = given._replace(q=q, k=k, v=v).run(BACKEND)
    assert torch.equal(changed[20:80], y[20:80])
    assert changed[:20].isnan().all()


@pytest.mark.parametrize("kind", ["log", "sqrt"])
def test_edges_of_buckets_are_those_of_the_formula(kind: str) -> None:
    edges = time_edges(30, kind, 0.301 if kind == "log" else 1.5)
    seconds = torch.cat([edges, edges - 1, edges + 1, torch.randint(0, int(edges[-1]) * 2, (500,))]).clamp(min=0)
    exact = seconds.double()
    due = exact.clamp(min=1).log() / 0.301 if kind == "log" else exact.sqrt() / 1.5
    found = torch.bucketize(seconds, edges, right=True)
    assert torch.equal(found, due.add(1e-9).floor().long().clamp(max=29))


def test_times_as_queries_and_as_keys() -> None:
    """The reference implementation gives a query the time of the next event."""
    given = case("causal", bias=True, lengths=(50,))
    times = given.words["times"]
    later = torch.cat([times[1:], times[-1:]])
    pair = given._replace(words=given.words | {"times": (later, times)})
    found = pair.to(torch.float32).run(BACKEND)
    columns = torch.bucketize(later[:, None] - times[None], given.words["bias"].edges, right=True)
    bias = given.words["bias"].times[:, columns]  # (H, n, n)
    i = torch.arange(50)
    bias = bias + given.words["bias"].positions[:, (i[:, None] - i[None]).clamp(0, 29)]
    scores = 0.3 * torch.einsum("ihd,jhd->hij", given.q, given.k) + bias
    due = torch.einsum("hij,jhd->ihd", torch.nn.functional.silu(scores).tril(), given.v) / 50
    torch.testing.assert_close(found, due.float(), rtol=1e-4, atol=1e-5)


def test_nothing_to_compute() -> None:
    q = torch.randn(0, 2, 8, requires_grad=True)
    for cu in (torch.tensor([0]), torch.tensor([0, 0, 0])):
        y = hstu_attention(q, q, q, cu, alpha=1.0, backend=BACKEND)
        assert y.shape == (0, 2, 8)
        y.sum().backward()


TIMES = RelativeBias(times=torch.zeros(3), edges=time_edges(3))
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "falling times": ({"bias": TIMES, "times": torch.arange(9).flip(0)}, "falls at row 1"),
    "small table": ({"bias": replace(TIMES, edges=time_edges(7)), "times": torch.arange(9)}, "makes 7 buckets, and .* 3 columns"),
    "no times": ({"bias": TIMES}, "times is None"),
    "no bias": ({"times": torch.arange(9)}, "times came without a bias"),
    "edges": ({"bias": replace(TIMES, edges=torch.tensor([4, 3])), "times": torch.arange(9)}, "edges falls"),
    "zero": ({"bias": RelativeBias(torch.zeros(4), zero=4)}, "zero is 4"),
    "zero without positions": (
        {"bias": replace(TIMES, zero=4), "times": torch.arange(9)},
        "zero is 4, and bias has no table of pos",
    ),
    "heads of a table": ({"bias": RelativeBias(torch.zeros(3, 4))}, "one for each of 2 heads"),
    "targets": ({"targets": 5}, "user 0 has 4 rows"),
    "negative targets": ({"targets": torch.tensor([-1, 2])}, "targets has -1"),
    "targets of other users": ({"targets": torch.tensor([1, 2, 3])}, r"shape \(2,\)"),
    "contextual": ({"contextual": 3, "targets": 2}, "user 0 has 4 rows; contextual is 3 and targets 2"),
    "mask": ({"mask": "causal"}, "mask is 'causal'"),
    "alpha": ({"alpha": float("nan")}, "alpha is nan"),
    "rows of times": ({"bias": TIMES, "times": torch.arange(8)}, "has 8 rows; q has 9"),
    "positions": ({"positions": torch.arange(9)}, "positions came without a bias"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_told_in_a_sentence(what: str) -> None:
    words, due = BAD[what]
    q = torch.randn(9, 2, 8)
    with pytest.raises(rt.InvalidInput, match=due) as error:
        hstu_attention(q, q, q, torch.tensor([0, 4, 9]), **{"alpha": 1.0, **words})
    assert "\n" not in str(error.value)


def test_tensors_that_do_not_fit() -> None:
    q, cu = torch.randn(9, 2, 8), torch.tensor([0, 4, 9])
    with pytest.raises(rt.InvalidInput, match=r"k is torch\.float64"):
        hstu_attention(q, q.double(), q, cu, alpha=1.0)
    with pytest.raises(rt.InvalidInput, match="same rows and heads"):
        hstu_attention(q, q[:, :1], q[:, :1], cu, alpha=1.0)
    with pytest.raises(rt.InvalidInput, match="cu ends at 8; must end at 9"):
        hstu_attention(q, q, q, torch.tensor([0, 4, 8]), alpha=1.0)
    with pytest.raises(rt.InvalidInput, match=re.escape("hstu_attention has no argument causal")):
        hstu_attention(q, q, q, cu, alpha=1.0, causal=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("mask", ["causal", "both sides"])
@pytest.mark.parametrize("zero", [0, 7])
def test_gradients_with_positions_of_the_callers_own(mask: str, zero: int) -> None:
    """Positions that stand still, go on by one, leave gaps wider than the table, and go beyond 32 bits."""
    given = case(mask, 2, (2, 0, 0, 5, 40), True, lengths=(5, 0, 3, 40, 150), zero=zero)
    steps = torch.tensor([0, 1, 1, 1, 2, 5, 40, 1 << 41])[torch.randint(0, 8, (198,))]
    # a run as of a history without gaps
    steps[60:130] = 1
    positions = torch.cat([steps[start:stop].cumsum(0) - 3 for start, stop in ((0, 5), (5, 8), (8, 48), (48, 198))])
    given = given._replace(words=given.words | {"positions": positions}).to(torch.float32)
    dy = torch.randn(given.v.shape)
    assert_near(gradients(given, BACKEND, dy), gradients(given.to(D64), "eager", dy.double()), 1e-5)


def test_positions_of_the_callers_own() -> None:
    """A history with gaps: distances are those of the positions."""
    given = case("causal", bias=True, lengths=(40,))
    positions = torch.arange(40) * 3
    found = given._replace(words=given.words | {"positions": positions}).run("tiled")
    bias = given.words["bias"]
    times = given.words["times"]
    columns = torch.bucketize(times[:, None] - times[None], bias.edges, right=True)
    scores = 0.3 * torch.einsum("ihd,jhd->hij", given.q, given.k) + bias.times[:, columns]
    scores = scores + bias.positions[:, (positions[:, None] - positions[None]).clamp(0, 29)]
    due = torch.einsum("hij,jhd->ihd", torch.nn.functional.silu(scores).tril(), given.v) / 40
    torch.testing.assert_close(found, due)


def test_checkpoints() -> None:
    q, k, v = (torch.randn(9, 2, 8, requires_grad=True) for _ in range(3))
    table, cu = torch.randn(2, 5, requires_grad=True), torch.tensor([0, 4, 9])

    def run() -> Tensor:
        return hstu_attention(q, k, v, cu, alpha=0.5, bias=RelativeBias(table), backend=BACKEND)

    found, due = (torch.autograd.grad(o.sum(), (q, k, v, table)) for o in (checkpoint(run, use_reentrant=False), run()))
    assert all(map(torch.equal, found, due))


@pytest.mark.skipif(BACKEND == "triton", reason="a compiler's graph in the interpreter")
def test_seams() -> None:
    """Compiled, under autocast, in inference mode, with torch.func, and as an operator."""
    given = case("causal", bias=True, lengths=(20, 7)).to(torch.float32)
    plain = given.run()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hstu_attention(q, k, v, given.cu, **given.words)

    torch.testing.assert_close(torch.compile(run, fullgraph=True)(*given[:3]), plain)
    with torch.inference_mode():
        assert torch.equal(run(*given[:3]), plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(*given[:3]).dtype == torch.bfloat16
    grads = torch.func.grad(lambda q: run(q, *given[1:3]).square().sum())(given.q.detach())
    due = torch.autograd.grad(plain.square().sum(), given.q)[0]
    torch.testing.assert_close(grads, due, rtol=1e-4, atol=1e-6)
    torch.library.opcheck(
        torch.ops.rooftile.hstu_attention.default,
        (*(x.detach().requires_grad_() for x in given[:3]), None, None, given.cu, None, None, None, None, None, 0.3, None, 0, 0,
         [-1, 0, -1], "tiled"),
    )  # fmt: skip
