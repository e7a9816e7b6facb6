"""Target attention's kernels on a GPU: against the fp64 definition, the same bits each time and for any number of candidates."""

from __future__ import annotations

import pytest
import torch

from rooftile.recommend.target.kernels import parts
from tests.recommend.target_cases import D64, ORDERS, SEARCHES, WEIGHTS, Case, by_sorting, case, check_order

pytestmark = pytest.mark.gpu
LENGTHS = (700, 0, 3, 40, 300, 129)
ERRORS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gradients(given: Case, do: torch.Tensor, backend: str) -> tuple[torch.Tensor, ...]:
    o = given.run(backend)
    return (o, *torch.autograd.grad(o, given.leaves, do.to(o.dtype)))


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(32, torch.float32), (64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)],
)
@pytest.mark.parametrize(("search", "bias"), [("whole", 0), ("whole", 4), ("category", 1)])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_outputs_and_gradients(weights, search, bias, dim, dtype) -> None:
    given = case(weights, search, bias, lengths=LENGTHS, M=100, D=dim, Dv=dim, k=30).to(dtype, "cuda")
    exact = given.to(D64, "cuda")
    do = torch.randn(exact.q.shape, dtype=D64, device="cuda").to(dtype)
    first = gradients(given, do, "triton")
    for found, due in zip(first, gradients(exact, do.double(), "eager"), strict=True):
        assert (found.double() - due).abs().max().item() <= ERRORS[dtype] * due.abs().max().item()
    for again, before in zip(gradients(given, do, "triton"), first, strict=True):
        assert torch.equal(again, before)


@pytest.mark.parametrize("k", [6, 64, 200, 300])
@pytest.mark.parametrize("search", SEARCHES[1:])
def test_a_search_is_a_sort(search, k) -> None:
    # quarters, and a scale that is one: scores are exact in any order of the sum
    given = case(search=search, bias=1, lengths=(5, 0, 400), M=3, D=16, k=k)
    leaves = (x.detach().mul(4).round().div(4) for x in given[:4])
    given = Case(*leaves, given.cu, given.words).to(torch.float32)
    assert torch.equal(given.to(torch.float32, "cuda").events().cpu(), by_sorting(given))


@pytest.mark.parametrize("k", [20, 100, 256])
@pytest.mark.parametrize("order", ORDERS)
def test_searches_of_histories_in_awkward_orders(order, k) -> None:
    """Long enough that one column has more of the best than there is room for."""
    check_order(order, (60000, 0, 127, 128, 129, 4000), k, "cuda")


@pytest.mark.parametrize("search", ["whole", "exact", "lsh", "category"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_one_candidate_at_a_time_is_many_at_once(weights, search) -> None:
    given = case(weights, search, 1, lengths=LENGTHS, M=70).to(torch.bfloat16, "cuda")
    with torch.no_grad():
        together = given.run(deterministic=True)
        for m in (0, 33, 69):
            words = given.words | {name: given.words[name][:, m : m + 1] for name in ("q_categories",) if name in given.words}
            alone = given._replace(q=given.q[:, m : m + 1], words=words)
            assert torch.equal(alone.run(deterministic=True), together[:, m : m + 1])


@pytest.mark.parametrize("search", ["whole", "exact", "lsh"])
def test_in_a_captured_graph(search) -> None:
    given = case("silu", search, 1, lengths=LENGTHS, M=70).to(torch.bfloat16, "cuda")
    with torch.no_grad():
        due = given.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = given.run()
        graph.replay()
    assert torch.equal(o, due)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_softmax_over_parts_of_few_users_histories(dtype, monkeypatch) -> None:
    """Against packed attention to whole histories, which has the same tolerance, eager and in a graph that is replayed."""
    given = case(lengths=(9000, 0, 5, 4500, 8000), M=70, H=4, Hk=2, D=128, Dv=128).to(dtype, "cuda")
    q, keys, values = (x.detach() for x in given[:3])
    given = given._replace(q=q, keys=keys, values=values)
    monkeypatch.setattr(parts, "LEAST_CAPTURED", 1024)
    monkeypatch.setattr(parts, "LEAST_EAGER", 1024)
    ran = []
    attend = parts.attend
    monkeypatch.setattr(parts, "attend", lambda batch, scale, number: ran.append(number) or attend(batch, scale, number))
    found = given.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = given.run()
    assert len(ran) == 2
    assert ran[0] > 1
    monkeypatch.setattr(parts, "parts_of", lambda batch: 1)
    due = given._replace(q=q.double(), keys=keys.double(), values=values.double()).run("eager")
    graph.replay()
    for x in (found, o, given.run()):
        assert (x.double() - due).abs().max().item() <= ERRORS[dtype] * due.abs().max().item()
    q[0] = torch.nan
    graph.replay()
    assert o[0].isnan().all()
    assert torch.equal(o[1:], found[1:])
