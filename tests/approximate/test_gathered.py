"""Attention between gathered rows, by plain operations and in the kernels, against the definitions of Reformer and Routing."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.approximate import gathered
from rooftile.approximate.gathered.lists import slots_of
from rooftile.approximate.reformer import definition as reformer
from rooftile.approximate.routing import definition as routing
from rooftile.runtime import launch
from tests.approximate.tolerance import assert_within


class Rounds(NamedTuple):
    name: str
    T: int = 21
    H: int = 2
    Hv: int = 1
    D: int = 8
    Dv: int = 8
    chunk: int = 4
    R: int = 2
    causal: bool = True
    strict: bool = False
    once: bool = True


class Groups(NamedTuple):
    name: str
    T: int = 19
    S: int = 19
    H: int = 2
    Hk: int = 1
    D: int = 8
    Dv: int = 8
    c: int = 4
    w: int = 5
    causal: bool = True


ROUNDS = [
    Rounds("three rounds", T=17, R=3),
    Rounds("full, 24 wide", T=13, Hv=2, D=24, chunk=5, causal=False),
    Rounds("counted", T=17, chunk=8, once=False),
    Rounds("strict", T=17, strict=True),
    Rounds("strict, counted, one round", T=13, R=1, strict=True, once=False),
    Rounds("one chunk", T=7, chunk=16),
    Rounds("two chunks", T=9, chunk=5, causal=False),
    Rounds("one round", T=19, Dv=24, R=1),
    Rounds("several tiles to a chunk", T=80, H=1, chunk=36),
    Rounds("one token", T=1),
]
GROUPS = [
    Groups("several clusters per token", w=12),
    Groups("none", c=2, w=3),
    Groups("more keys", T=12, S=30, Hk=2, c=3, w=14),
    Groups("full", D=24, Dv=16, causal=False),
    Groups("several tiles to a cluster", T=50, S=50, H=1, c=2, w=40),
    Groups("one key", T=1, S=1, c=1, w=1),
]


def qkv(*sizes: tuple[int, int, int, int]) -> list[Tensor]:
    torch.manual_seed(sum(sizes[0]))
    return [torch.randn(size) for size in sizes]


def made(it: Rounds, B: int = 1) -> tuple[list[Tensor], Tensor]:
    tensors = qkv((B, it.T, it.H, it.D), (B, it.T, it.Hv, it.Dv))
    return tensors, ap.lsh(tensors[0], it.R, 4)


def attend(it: Rounds, qk: Tensor, v: Tensor, hashes: Tensor, backend: str = "auto") -> Tensor:
    lists = gathered.from_hashes(hashes, it.chunk, it.causal, it.strict, it.once)
    k = torch.nn.functional.rms_norm(qk, qk.shape[-1:], eps=1e-6)
    return gathered.attend(qk, k, v, lists, scale=qk.shape[-1] ** -0.5, backend=backend)


def definition(it: Rounds, qk: Tensor, v: Tensor, hashes: Tensor) -> Tensor:
    once = "once" if it.once else "counted"
    return reformer.reformer(qk, v, hashes, causal=it.causal, chunk=it.chunk, duplicates=once, strict=it.strict, scale=1.0)


def members(it: Groups, B: int = 1) -> tuple[list[Tensor], ap.Members]:
    tensors = qkv((B, it.T, it.H, it.D), (B, it.S, it.Hk, it.D), (B, it.S, it.Hk, it.Dv))
    _, found = ap.routing(*tensors, torch.randn(it.H, it.c, it.D), width=it.w, backend="eager")
    return tensors, found


def attend_groups(it: Groups, q: Tensor, k: Tensor, v: Tensor, found: ap.Members, backend: str = "auto") -> Tensor:
    lists = gathered.from_members(*found, it.causal)
    return gathered.attend(routing.normed(q), routing.normed(k), v, lists, scale=0.3, backend=backend)


def ways() -> list[str]:
    """Plain operations, and the kernels where they run."""
    return ["plain"] + ["auto"] * (gathered.refusal(torch.empty(1, 1, 1, 8), torch.empty(1, 1, 1, 8)) is None)


def with_gradients(o: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    return [o, *torch.autograd.grad(o, leaves, do)]


def assert_equal(found: list[Tensor], due: list[Tensor]) -> None:
    for a, b in zip(found, due, strict=True):
        torch.testing.assert_close(a.double(), b, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("it", ROUNDS, ids=lambda it: it.name)
def test_rounds_equal_the_definition(it: Rounds) -> None:
    tensors, hashes = made(it, B=2 if it.name == "strict" else 1)
    wide = [x.double().requires_grad_() for x in tensors]
    due = with_gradients(definition(it, *wide, hashes), wide)
    for backend in ways():
        leaves = [x.clone().requires_grad_() for x in tensors]
        assert_equal(with_gradients(attend(it, *leaves, hashes, backend), leaves), due)


@pytest.mark.parametrize("it", GROUPS, ids=lambda it: it.name)
def test_groups_equal_the_definition(it: Groups) -> None:
    tensors, found = members(it, B=2 if it.name == "full" else 1)
    wide = [x.double().requires_grad_() for x in tensors]
    due = with_gradients(routing.routing(*wide, *found, causal=it.causal, scale=0.3), wide)
    for backend in ways():
        leaves = [x.clone().requires_grad_() for x in tensors]
        assert_equal(with_gradients(attend_groups(it, *leaves, found, backend), leaves), due)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(dtype: torch.dtype) -> None:
    it = Rounds("16 bits", T=15, D=16, chunk=6)
    tensors, hashes = made(it)
    answers = []
    for run, kind in ((definition, torch.float64), (definition, dtype), (attend, dtype), (attend, dtype)):
        leaves = [x.to(dtype).to(kind).requires_grad_() for x in tensors]
        found = with_gradients(run(it, *leaves, hashes), leaves)
        answers.append(dict(zip(("o", "dqk", "dv"), found, strict=True)))
    exact, usual, once, again = answers
    assert_within(once, exact, usual, dtype)
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize("it", [ROUNDS[2], ROUNDS[3], ROUNDS[7]], ids=lambda it: it.name)
def test_a_nan_in_a_round_shows_where_it_is_seen_and_nowhere_else(it: Rounds) -> None:
    (qk, v), hashes = made(it)
    qk[0, 9, 0, 1], v[0, 6, 0, 2] = math.nan, math.inf
    seen = reformer.sees(hashes, it.chunk, it.causal, it.strict).any(0)[0]  # (H, T, T)
    none = ~seen.any(-1)
    due = seen[..., 6] | none & (torch.arange(it.T) == 6)
    due[0] |= seen[0, :, 9] | (torch.arange(it.T) == 9) & ~none[0]
    for backend in ways():
        leaves = [x.clone().requires_grad_() for x in (qk, v)]
        o = attend(it, *leaves, hashes, backend)
        assert torch.equal(~o[0].isfinite().all(-1).T, due), backend
        # an incoming NaN stays with its row
        do = torch.ones_like(o)
        do[0, 3, 1, 0] = math.nan
        dqk, dv = torch.autograd.grad(o, leaves, do)
        wrong = due.clone()
        wrong[1, 3] = True
        touched = (seen & wrong[..., None]).any(1)  # (H, S), keys that a wrong row sees
        assert torch.equal(dqk[0].isfinite().all(-1).T | wrong | touched, torch.ones_like(due)), backend
        assert dv[0, ~(touched | none & wrong).any(0)].isfinite().all(), backend


def test_a_nan_in_a_group_shows_where_it_is_seen_and_nowhere_else() -> None:
    it = GROUPS[0]
    (q, k, v), found = members(it)
    k[0, 4, 0, 1], v[0, 7, 0, 0], q[0, 11, 0, 0] = math.nan, math.nan, math.inf
    finite = [x.nan_to_num(0.0, 0.0) for x in (q, k, v)]
    due = ~routing.routing(q, k, v, *found, causal=True, scale=0.3).isfinite().all(-1)
    for backend in ways():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = attend_groups(it, *leaves, found, backend)
        assert torch.equal(~o.isfinite().all(-1), due), backend
        torch.testing.assert_close(o[~due], attend_groups(it, *finite, found, backend)[~due])
        dq, *_ = torch.autograd.grad(o, leaves, torch.ones_like(o))
        assert torch.equal(~dq.isfinite().all(-1), due), backend


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6, -1e6, 1e8])
@pytest.mark.parametrize("kind", ["rounds", "groups"])
def test_weights_add_up_to_one_in_the_backward_too(kind: str, offset: float) -> None:
    """So the gradients of the values add up to those of the outputs, whatever all scores of a row share."""
    if kind == "rounds":
        (q, v), hashes = made(Rounds("offset", Hv=2))
        k, lists = q.clone(), gathered.from_hashes(hashes, 4, True, False, True)
    else:
        (q, k, v), found = members(Groups("offset", Hk=2, causal=False))
        lists = gathered.from_members(*found, False)
    k[..., 0], q[..., 0] = 1.0, 0.0
    q[:, 1::2, :, 0] = offset
    for backend in ways():
        v = v.detach().requires_grad_()
        o = gathered.attend(q, k, v, lists, scale=1.0, backend=backend)
        # a row that sees nothing is 0, or its own value
        do = torch.where((o == 0).all(-1, keepdim=True), 0.0, torch.randn(o.shape))
        (dv,) = torch.autograd.grad(o, v, do)
        torch.testing.assert_close(dv.double().sum(1), do.double().sum(1), atol=1e-4, rtol=1e-4)


def test_large_scores() -> None:
    it = Rounds("large", R=2)
    (qk, v), hashes = made(it)
    due = definition(it, (qk * 1e4).double(), v.double() * 1e30, hashes)
    for backend in ways():
        torch.testing.assert_close(attend(it, qk * 1e4, v * 1e30, hashes, backend).double(), due, atol=1e25, rtol=1e-3)


def test_places_out_of_range_are_passed_over() -> None:
    """A GPU's lists are not read by the checks."""
    q, k, v = qkv(*[(1, 6, 1, 8)] * 3)
    places = torch.tensor([[[[0, 1, 2**31 - 1], [3, -1, 4]]]], dtype=torch.int32)
    for backend in ways():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = gathered.attend(*leaves, gathered.from_members(places, places, False), scale=1.0, backend=backend)
        pairs = [torch.tensor([[[[a, b]]]], dtype=torch.int32) for a, b in ((0, 1), (3, 4))]
        due = sum(gathered.attend(*leaves, gathered.from_members(x, x, False), scale=1.0, backend="plain") for x in pairs)
        torch.testing.assert_close(o, due)
        for a, b in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (o, due)), strict=True):
            torch.testing.assert_close(a, b)


def test_the_lists_of_two_rounds() -> None:
    """By hand: five tokens in chunks of two; round 0 sorts them as they are, round 1 as 1, 3, 0, 2, 4."""
    hashes = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 0, 2]], dtype=torch.int32).T[None, :, None]
    lists = gathered.from_hashes(hashes, 2, True, False, True)
    assert lists.rows.flatten(1).tolist() == [[0, 1, 2, 3, 4], [1, 3, 0, 2, 4]]
    assert lists.marks is not None
    assert lists.marks.flatten(2).tolist() == [[[0, 0, 1, 1, 2], [1, 0, 1, 0, 2]], [[0, 0, 1, 1, 2], [0, 1, 0, 1, 2]]]
    assert (lists.groups, lists.before) == (3, 1)
    lists = gathered.from_hashes(hashes, 2, True, True, False)
    assert lists.lows is not None
    # the own bucket begins at ranks 0 and 2 in round 0, at 0, 2 and 4 in round 1
    assert lists.lows.flatten(1).tolist() == [[0, 0, 2, 2, 2], [0, 0, 2, 2, 4]]
    slots = slots_of(torch.tensor([[[2, 0, 2, 5, -1], [1, 0, 0, 0, 0]]], dtype=torch.int32), 4)
    assert slots.starts[0].tolist() == [[1, 2, 2, 4, 4], [0, 4, 5, 5, 5]]
    assert slots.entries[0].tolist() == [[4, 1, 0, 2, 3], [1, 2, 3, 4, 0]]


def test_the_methods_take_the_kernels_and_name_what_they_refuse() -> None:
    (qk, v), hashes = made(ROUNDS[0])
    tensors, found = members(GROUPS[0])
    centroids = torch.zeros(2, 4, 8)
    runs = {
        "reformer": lambda backend: ap.reformer(qk, v, rt.CAUSAL, hashes=hashes, chunk=4, backend=backend),
        "routing": lambda backend: ap.routing(*tensors, centroids, rt.CAUSAL, members=found, backend=backend)[0],
    }
    for name, run in runs.items():
        if len(ways()) == 1:
            with pytest.raises(rt.Unsupported, match=f"backend 'triton' cannot run {name}: tensors are on cpu; needs a CUDA GPU"):
                run("triton")
            continue
        launched: list[str] = []
        with launch.observe(launched.append):
            torch.testing.assert_close(run("triton"), run("eager"), atol=2e-5, rtol=1e-4)
        assert "_forward" in launched
    for x, rounds, due in ((qk.double(), 1, "float64; has"), (qk.repeat(1, 1, 1, 17), 1, "head dims 136"), (qk, 9, "9 rounds")):
        if len(ways()) == 2:
            assert str(gathered.refusal(x, v, rounds)).startswith(due)


def test_the_operator_compiles() -> None:
    it = Rounds("compiled", T=9)
    (qk, v), hashes = made(it)

    def loss(qk: Tensor) -> Tensor:
        return attend(it, qk, v, hashes).square().sum()

    leaf = qk.clone().requires_grad_()
    (due,) = torch.autograd.grad(loss(leaf), leaf)
    torch._dynamo.reset()
    (found,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(leaf), leaf)
    torch.testing.assert_close(found, due)


def test_nothing_to_compute() -> None:
    q, k, v = qkv((1, 0, 2, 8), (1, 3, 2, 8), (1, 3, 2, 8))
    places = torch.empty(1, 2, 3, 0, dtype=torch.int32)
    for backend in ways():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = gathered.attend(*leaves, gathered.from_members(places, places, True), scale=1.0, backend=backend)
        assert o.shape == (1, 0, 2, 8)
        assert all(not x.any() for x in torch.autograd.grad(o.sum(), leaves))


@pytest.mark.parametrize(("rounds", "buckets", "dtype"), [(3, 6, torch.float32), (1, 256, torch.bfloat16)])
def test_hashes_are_those_of_plain_operations(rounds: int, buckets: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 70, 2, 24).to(dtype)
    x[0, 3] = 0
    found = ap.lsh(x.requires_grad_(), rounds, buckets, seed=5)
    R = torch.randn((2, 24, rounds, buckets // 2), generator=torch.Generator().manual_seed(5))
    turned = torch.einsum("bthd,hdrn->bthrn", x.detach().double(), R.double())
    assert torch.equal(found, torch.cat([turned, -turned], -1).argmax(-1).int())
    # ties go to the lower bucket
    assert not found[0, 3].any()


@pytest.mark.parametrize(("T", "width"), [(37, 5), (20, 20)])
def test_members_are_those_of_the_definition(T: int, width: int) -> None:
    x, centroids = torch.randn(1, T, 2, 16), torch.randn(2, 2, 16)
    # tokens that are alike, scores of 0, and a NaN
    x[:, T // 2 :: 3] = x[:, T // 2 : T // 2 + 1]
    centroids[1, 1] = 0
    x[0, 5, 0] = math.nan
    keys = x[:, :, :1]
    _, found = ap.routing(x, keys, keys, centroids, rt.CAUSAL, width=width)
    assert torch.equal(found.queries, routing.taken(x, centroids, width).int())
    assert torch.equal(found.keys, routing.taken(keys.expand_as(x), centroids, width).int())
