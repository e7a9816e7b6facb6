"""Target attention: against pairs in Python and the definition in fp64, in plain operations and in Triton's interpreter."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import rooftile as rt
from rooftile.recommend import simhash, simhash_planes, target_attention, target_attention_with_events
from rooftile_lab.bench.suites import target_attention as bench
from tests.recommend.target_cases import D64, SEARCHES, WEIGHTS, Case, by_pairs, by_sorting, case

# the interpreter runs the same tests
BACKEND = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "tiled"
ERRORS = {D64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gradients(given: Case, backend: str | None, do: Tensor, **more: Any) -> tuple[Tensor, ...]:
    o = given.run(backend, **more)
    return (o, *torch.autograd.grad(o, given.leaves, do.to(o.dtype)))


def assert_near(found: tuple[Tensor, ...], exact: tuple[Tensor, ...], error: float) -> None:
    for n, (x, due) in enumerate(zip(found, exact, strict=True)):
        worst = (x.double() - due.double()).abs().max().item()
        assert worst <= error * max(due.abs().max().item(), 1e-3), (n, worst)


@pytest.mark.parametrize("bias", [0, 1, 4])
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_definition_is_the_sum_over_pairs(weights: str, search: str, bias: int) -> None:
    given = case(weights, search, bias, lengths=(5, 0, 1, 12), M=2, k=4)
    events = None if search == "whole" else by_sorting(given)
    if events is not None:
        assert torch.equal(given.events("eager"), events)
    torch.testing.assert_close(given.run("eager"), by_pairs(given, events), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [D64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [0, 4])
@pytest.mark.parametrize("search", ["whole", "summed", "exact", "category"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_outputs_and_gradients(weights: str, search: str, bias: int, dtype: torch.dtype) -> None:
    check_outputs_and_gradients(weights, search, bias, dtype)


def check_outputs_and_gradients(weights: str, search: str, bias: int, dtype: torch.dtype, **more: Any) -> None:
    given = case(weights, search, bias, **more).to(dtype)
    exact = given.to(D64)
    do = torch.randn(exact.run("eager").shape, dtype=D64).to(dtype)
    if search != "whole":
        # features in both precisions have the same scores
        assert torch.equal(given.events(BACKEND), exact.events("eager"))
    due = gradients(exact, "eager", do.double())
    assert_near(gradients(given, BACKEND, do), due, ERRORS[dtype])
    if BACKEND == "tiled":
        # other tiles, and packed attention
        assert_near(gradients(given, BACKEND, do, deterministic=True), due, ERRORS[dtype])
        assert_near(gradients(given, None, do), due, ERRORS[dtype])


@pytest.mark.parametrize("search", SEARCHES[1:])
def test_a_search_is_a_sort(search: str) -> None:
    """Also where many scores are equal: then the latest come first."""
    few = {"lengths": (5, 0, 330), "M": 2} if BACKEND == "triton" else {}
    given = case(search=search, bias=1, D=5, **few)
    given = given.to(torch.float32) if BACKEND == "triton" else given
    due = by_sorting(given)
    assert torch.equal(given.events(BACKEND), due)
    assert torch.equal(given.events(BACKEND, deterministic=True), due)
    if search != "category":
        # the first user has 5 events, and k is 6
        assert bool((due[0, ..., 5] == -1).all())
        assert bool((due[0, ..., :5] >= 0).all())


def test_equal_scores_in_all_precisions() -> None:
    """Zeros of both signs are equal, NaN is above all, and -inf is not read."""
    keys = torch.tensor([0.0, 1.0, -0.0, 1.0, 0.0, float("nan"), -1.0])[:, None, None]
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, float("-inf")])
    for dtype in ERRORS:
        for backend in ("eager", BACKEND) if dtype != D64 or BACKEND == "tiled" else ("eager",):
            words = {"top_k": 7, "bias": bias.to(dtype), "backend": backend, "scale": 1.0}
            _, events = target_attention_with_events(
                torch.ones(1, 1, 1, 1, dtype=dtype), keys.to(dtype), torch.tensor([0, 7]), **words
            )
            assert events.flatten().tolist() == [5, 3, 1, 4, 2, 0, -1]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_all_events_found_is_the_whole_history(weights: str) -> None:
    given = case(weights, "exact", 1, k=150)
    whole = case(weights, "whole", 1)
    whole = Case(*given[:5], whole.words)
    do = torch.randn(given.run().shape, dtype=D64)
    found = gradients(given.to(torch.float32), BACKEND, do.float())
    assert_near(found, gradients(whole, "eager", do), 1e-5)


@pytest.mark.parametrize("search", ["whole", "exact", "lsh", "category"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_one_candidate_at_a_time_is_many_at_once(weights: str, search: str) -> None:
    """Bit for bit under `deterministic`, beside any neighbours."""
    long = 300 if BACKEND == "tiled" else 70
    given = case(weights, search, 1, lengths=(long, 0, 40), M=35).to(torch.float32)
    with torch.no_grad():
        together = given.run(BACKEND, deterministic=True)
        for m in (0, 34):
            words = given.words | {name: given.words[name][:, m : m + 1] for name in ("q_categories",) if name in given.words}
            alone = given._replace(q=given.q[:, m : m + 1], words=words)
            assert torch.equal(alone.run(BACKEND, deterministic=True), together[:, m : m + 1])
        last = {name: x[-1:] for name, x in given.words.items() if name == "q_categories"}
        last |= {name: x[long:] for name, x in given.words.items() if name == "key_categories"}
        keys, values, bias = (x[long:] for x in given[1:4])
        user = Case(given.q[2:], keys, values, bias, torch.tensor([0, 40]), given.words | last)
        assert torch.equal(user.run(BACKEND, deterministic=True), together[2:])


@pytest.mark.parametrize("search", ["whole", "exact", "category"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_bad_candidate_and_a_bad_user_stay_alone(weights: str, search: str) -> None:
    """NaN in one candidate: its own row is NaN, no other; its user's events may have NaN for gradients, others' have none."""
    given = case(weights, search, 1, lengths=(30, 70, 20)).to(torch.float32)
    do = torch.randn(given.run().shape)
    clean = gradients(given, BACKEND, do)
    q, keys = given.q.detach().clone(), given.keys.detach().clone()
    q[1, 3] = torch.nan
    keys[100:] = torch.nan
    spoiled = given._replace(q=q.requires_grad_(), keys=keys.requires_grad_())
    o, dq, dkeys, dvalues, dbias = gradients(spoiled, BACKEND, do)
    # a candidate of a category without events reads nothing
    assert o[1, 3].isnan().all() or search == "category"
    others = torch.arange(7) != 3
    for found, due in ((o, clean[0]), (dq, clean[1])):
        assert_near((found[0], found[1, others]), (due[0], due[1, others]), 1e-6)
    for found, due in zip((dkeys, dvalues, dbias), clean[2:], strict=True):
        assert_near((found[:30],), (due[:30],), 1e-6)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("search", ["whole", "exact"])
def test_gradients_by_finite_differences(search: str, weights: str) -> None:
    given = case(weights, search, 2, lengths=(6, 0, 9), M=2, H=2, Hk=1, D=3, Dv=2, k=3)

    def run(*leaves: Tensor) -> Tensor:
        # a small step leaves the choice as it is
        return given._replace(q=leaves[0], keys=leaves[1], values=leaves[2], bias=leaves[3]).run("tiled")

    assert torch.autograd.gradcheck(run, given.leaves)


def test_what_is_not_chosen_has_no_gradient() -> None:
    given = case("softmax", "exact", 1, lengths=(50,), M=1, H=2, Hk=2).to(torch.float32)
    events = given.events()[0, 0]  # (H, k)
    _, _, dkeys, dvalues, _ = gradients(given, BACKEND, torch.ones(given.run().shape))
    for h in range(2):
        for grad in (dkeys, dvalues):
            touched = grad[:, h].abs().sum(-1).nonzero().flatten().tolist()
            assert touched == sorted(events[h].tolist())


def test_packed_candidates() -> None:
    """Each user with as many candidates as it likes, one of them none."""
    given = case("silu", "category", 1).to(torch.float32)
    counts = torch.tensor([7, 3, 0, 1, 5])
    rows = torch.cat([b * 7 + torch.arange(n) for b, n in enumerate(counts.tolist())])
    words = given.given | {"q_categories": given.words["q_categories"].flatten()[rows], "backend": BACKEND}
    cu_q = torch.tensor([0, *counts.cumsum(0)], dtype=torch.int32)
    o, events = target_attention_with_events(given.q.flatten(0, 1)[rows], given.keys, given.cu, cu_q=cu_q, **words)
    torch.testing.assert_close(o, given.run(BACKEND).flatten(0, 1)[rows])
    assert torch.equal(events, given.events(BACKEND).flatten(0, 1)[rows])


def test_strides_and_head_dims() -> None:
    for D, Dv, H, Hk in ((17, 5, 3, 1), (64, 128, 2, 2), (160, 96, 2, 1)):
        given = case("silu", "whole", 1, D=D, Dv=Dv, H=H, Hk=Hk, lengths=(70, 0, 9))
        do = torch.randn(given.run().shape, dtype=D64)
        exact = gradients(given, "eager", do)
        for turn in ((0, 1), (0, 2)):
            leaves = [x.detach().float().transpose(*turn).contiguous().transpose(*turn).requires_grad_() for x in given[:3]]
            odd = Case(*leaves, given.to(torch.float32).bias, given.cu, given.words)
            assert_near(gradients(odd, BACKEND, do.float()), exact, 1e-5)


def test_values_are_keys_and_nothing_to_compute() -> None:
    keys = torch.randn(9, 2, 8, requires_grad=True)
    cu = torch.tensor([0, 4, 9])
    q = torch.randn(2, 3, 2, 8)
    for words in ({}, {"top_k": 4}, {"weights": "silu"}):
        one = target_attention(q, keys, cu, backend=BACKEND, **words)
        two = target_attention(q, keys, cu, values=keys, backend=BACKEND, **words)
        assert torch.equal(one, two)
        torch.testing.assert_close(target_attention(q, keys, cu, values=keys.clone(), backend=BACKEND, **words), one)
        for many, few, offsets in ((q[:, :0], keys, cu), (q, keys[:0], torch.tensor([0, 0, 0])), (q[:0], keys[:0], cu[:1])):
            more = {"short": "all", **words} if "top_k" in words else words
            o = target_attention(many, few, offsets, **more)
            assert o.shape == many.shape
            assert not bool(o.any())
            o.sum().backward() if o.requires_grad else None


def test_hashes() -> None:
    """Bits are sides of planes, whatever their number; planes follow the seed."""
    planes = simhash_planes(16, 70, seed=5)
    assert torch.equal(planes, simhash_planes(16, 70, seed=5))
    assert not torch.equal(planes, simhash_planes(16, 70, seed=6))
    x = torch.randn(4, 3, 16)
    words = simhash(x, planes)
    assert words.shape == (4, 3, 3)
    bits = (words[..., None].long() >> torch.arange(32)) & 1
    assert torch.equal(bits.flatten(-2)[..., :70].bool(), x.double() @ planes.double() > 0)
    assert not bool(bits.flatten(-2)[..., 70:].any())
    assert torch.equal(simhash(x.bfloat16(), planes), simhash(x.bfloat16().float(), planes))


@pytest.mark.skipif(BACKEND == "triton", reason="plain operations")
def test_the_benchmark_compares_right_programs() -> None:
    problem = bench.problem_of("small", torch.device("cpu"), torch.float32)
    for who, call in bench.CALLS.items():
        assert who == "lsh" or bench.refusal(call, problem) == ""
    assert bench.refusal(lambda given: bench.softmax(given) * 1.01, problem).startswith("o is")
    torch.testing.assert_close(bench.exact(problem), bench.gather(problem))


LSH = {"top_k": 2, "search": "lsh"}
CATEGORY = {"top_k": 2, "search": "category"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "top_k above the history": ({"top_k": 5}, "top_k is 5; user 0 has 4 events: short='all'"),
    "top_k of 0": ({"top_k": 0}, "top_k is 0; must be an int of at least 1"),
    "top_k of a word": ({"top_k": "all"}, "top_k is 'all'; must be an int"),
    "a search without top_k": ({"search": "exact"}, "search came without top_k"),
    "short": ({"top_k": 5, "short": "some"}, "short is 'some'; must be 'refuse' or 'all'"),
    "kind of search": ({"top_k": 2, "search": "soft"}, "search is 'soft'; must be 'exact', 'lsh' or 'category'"),
    "weights": ({"weights": "relu"}, "weights is 'relu'"),
    "scale": ({"scale": float("nan")}, "scale is nan"),
    "mean": ({"mean": 1}, "mean is 1; must be True or False"),
    "bias": ({"bias": torch.zeros(8)}, r"bias is a torch\.float32 tensor \(8,\); must be a float tensor \(9,\)"),
    "bias per candidate": ({"bias": torch.zeros(9, 3)}, r"must be a float tensor \(9,\) or \(9, 1\|2\)"),
    "values": ({"values": torch.zeros(8, 2, 8)}, "must be like keys"),
    "values of another dtype": ({"values": torch.zeros(9, 2, 8).double()}, r"values is torch\.float64; q is torch\.float32"),
    "users among candidates": ({"cu_q": torch.tensor([0, 6])}, "cu_q is given; packed candidates"),
    "no planes": (LSH, "planes is None; search='lsh' needs them"),
    "planes of another dim": ({**LSH, "planes": torch.zeros(7, 4)}, r"must be a float tensor \(8, bits\)"),
    "too many bits": ({**LSH, "planes": torch.zeros(8, 1025)}, "has 1025 columns; must have 1 to 1024"),
    "planes without hashes": ({"top_k": 2, "planes": torch.zeros(8, 4)}, "planes came with search='exact'"),
    "one side of the features": ({"top_k": 2, "search_q": torch.zeros(2, 3, 1, 4)}, "search_keys is None"),
    "features of two dtypes": (
        {"top_k": 2, "search_q": torch.zeros(2, 3, 1, 4), "search_keys": torch.zeros(9, 1, 4).double()}, "must share one dtype",
    ),
    "heads of the features": (
        {"top_k": 2, "search_q": torch.zeros(2, 3, 3, 4), "search_keys": torch.zeros(9, 1, 4)}, "search_q has 3 heads",
    ),
    "rows of the features": (
        {"top_k": 2, "search_q": torch.zeros(2, 3, 1, 4), "search_keys": torch.zeros(8, 1, 4)}, "search_keys has 8 rows",
    ),
    "heads of categories": ({**CATEGORY, "per_head": False}, "per_head came with search='category', which does not read it"),
    "no categories": (CATEGORY, "q_categories is None; search='category' needs"),
    "categories of events missing": ({**CATEGORY, "q_categories": torch.zeros(2, 3).int()}, "key_categories is None"),
    "categories in floats": ({**CATEGORY, "q_categories": torch.zeros(2, 3)}, "q_categories is a torch.float32"),
    "categories of other candidates": (
        {**CATEGORY, "q_categories": torch.zeros(2, 4).int(), "key_categories": torch.zeros(9).int()},
        "q has 6 candidates, 3 of each",
    ),
    "short with categories": (
        {
            **CATEGORY, "short": "all", "q_categories": torch.zeros(2, 3).int(), "key_categories": torch.zeros(9).int(),
        }, "short came with search='category', which does not read it",
    ),
    "categories without their search": ({"top_k": 2, "q_categories": torch.zeros(2, 3).int()}, "came with search='exact'"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_told_in_a_sentence(what: str) -> None:
    words, due = BAD[what]
    with pytest.raises(rt.InvalidInput, match=due) as error:
        target_attention(torch.randn(2, 3, 2, 8), torch.randn(9, 2, 8), torch.tensor([0, 4, 9]), **words)
    assert "\n" not in str(error.value)


def test_tensors_that_do_not_fit() -> None:
    q, keys, cu = torch.randn(2, 3, 2, 8), torch.randn(9, 2, 8), torch.tensor([0, 4, 9])
    calls: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((q, keys.double(), cu), {}, "keys is torch.float64; q is torch.float32"),
        ((q, keys, torch.tensor([0, 4, 8])), {}, "cu ends at 8; must end at 9, the number of events"),
        ((q, keys, torch.tensor([0, 5, 4, 9])), {}, "cu falls somewhere"),
        ((q[:1], keys, cu), {}, "q has candidates of 1 users; cu has 2 users"),
        ((q[0], keys, cu), {}, "without cu_q"),
        ((q[0], keys, cu), {"cu_q": torch.tensor([0, 3])}, "cu_q has 1 users; cu has 2"),
        ((q[0], keys, cu), {"cu_q": torch.tensor([0, 2, 4])}, "cu_q ends at 4; must end at 3, the number of candidates"),
        ((q, keys[..., :7], cu), {}, "keys has head dim 7; q has 8"),
        ((q, keys[:, :1].expand(-1, 3, -1), cu), {}, "q has 2 heads and keys has 3"),
        ((q.int(), keys.int(), cu), {}, "q is torch.int32"),
        ((q, [1], cu), {}, "keys is [1]; must be a dense tensor"),
        ((q, keys, cu), {"causal": True}, "target_attention has no argument causal"),
    ]
    for given, words, due in calls:
        with pytest.raises(rt.InvalidInput, match=re.escape(due)):
            target_attention(*given, **words)
    with pytest.raises(rt.InvalidInput, match="top_k is None; give a number"):
        target_attention_with_events(q, keys, cu, top_k=None)  # type: ignore[arg-type]
    with pytest.raises(rt.InvalidInput, match="bits is 2000; must be at most 1024"):
        simhash_planes(8, 2000)
    with pytest.raises(rt.InvalidInput, match="seed is -1"):
        simhash_planes(8, 16, seed=-1)


@pytest.mark.skipif(BACKEND == "triton", reason="a compiler's graph in the interpreter")
@pytest.mark.parametrize("words", [{"weights": "silu"}, {"top_k": 4}], ids=["whole", "searched"])
def test_seams(words: dict[str, Any]) -> None:
    """Compiled, under autocast, in inference mode, with torch.func, on meta, and as operators; numpy's numbers."""
    given = case("softmax", "whole", 1, lengths=(20, 7)).to(torch.float32)
    given = given._replace(words=words)
    plain = given.run()

    def run(*leaves: Tensor) -> Tensor:
        q, keys, values, bias = leaves
        return given._replace(q=q, keys=keys, values=values, bias=bias).run()

    if "top_k" in words:
        # both operators in one graph
        torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(*given.leaves), plain)
    with torch.inference_mode():
        assert torch.equal(run(*given.leaves), plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(*given.leaves).dtype == torch.bfloat16
    grads = torch.func.grad(lambda keys: run(given.q, keys, *given.leaves[2:]).square().sum())(given.keys.detach())
    due = torch.autograd.grad(plain.square().sum(), given.keys)[0]
    torch.testing.assert_close(grads, due, rtol=1e-4, atol=1e-5)
    mapped = torch.vmap(lambda q: run(q, *given.leaves[1:]))(torch.stack([given.q, given.q + 1]))
    torch.testing.assert_close(mapped[0], plain)
    far = run(*(x.detach().to("meta") for x in given.leaves))
    assert far.shape == plain.shape
    numpy = pytest.importorskip("numpy")
    more = {"top_k": numpy.int64(4)} if "top_k" in words else {"scale": numpy.float32(0.5), **words}
    alike = {"top_k": 4} if "top_k" in words else {"scale": 0.5, **words}
    assert torch.equal(given._replace(words=more).run(), given._replace(words=alike).run())


@pytest.mark.parametrize("search", ["whole", "exact"])
@pytest.mark.parametrize("bias", [0, 4])
def test_checkpoints(search: str, bias: int) -> None:
    given = case("silu", search, bias).to(torch.float32)
    do = torch.randn_like(given.run(BACKEND))
    due = gradients(given, BACKEND, do)
    o = checkpoint(lambda: given.run(BACKEND), use_reentrant=False)
    found = torch.autograd.grad(o, given.leaves, do)
    assert_near(found, due[1:], 1e-6)


@pytest.mark.skipif(BACKEND == "triton", reason="a compiler's graph in the interpreter")
def test_operators() -> None:
    q, keys, bias = (torch.randn(shape, requires_grad=True) for shape in ((6, 2, 8), (9, 1, 8), (9, 1)))
    cu_q, cu = torch.tensor([0, 3, 6]), torch.tensor([0, 4, 9])
    events = torch.ops.rooftile.target_search(
        *(x.detach() for x in (q, keys, bias)), cu_q, cu, 3, "exact", 0.3, True, False, "tiled"
    )
    for chosen in (None, events):
        for weights in ("softmax", "silu"):
            torch.library.opcheck(
                torch.ops.rooftile.target_attention.default,
                (q, keys, keys, bias, chosen, cu_q, cu, weights, 0.3, False, False, "tiled"),
            )
