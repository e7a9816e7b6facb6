"""Attention between gathered rows on a GPU: the kernels beside the definitions of Reformer and Routing, in each dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.runtime import launch
from tests.approximate.tolerance import assert_within

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def compare(run: Callable[..., Tensor], tensors: list[Tensor], dtype: torch.dtype, terms: int) -> None:
    """The kernels within the tolerance that the definition in this dtype gives, and the same bits twice."""
    do, answers = None, []
    for kind, backend in ((torch.float64, "eager"), (dtype, "eager"), (dtype, "triton"), (dtype, "triton")):
        leaves = [x.to(kind).requires_grad_() for x in tensors]
        o = run(*leaves, backend=backend)
        do = torch.randn_like(o).to(dtype) if do is None else do
        grads = torch.autograd.grad(o, leaves, do.to(o.dtype))
        answers.append({"o": o} | {f"d{n}": x for n, x in enumerate(grads)})
    exact, usual, found, again = answers
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert_within(found, exact, usual, dtype, terms=terms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("H", "Hv", "D", "Dv"), [(4, 4, 128, 128), (4, 1, 64, 64), (2, 1, 40, 24)])
@pytest.mark.parametrize("mode", ["causal", "full", "strict", "counted"])
def test_reformer(mode: str, H: int, Hv: int, D: int, Dv: int, dtype: torch.dtype, device: torch.device) -> None:
    T = 700
    qk, v = torch.randn(2, T, H, D, device=device, dtype=dtype), torch.randn(2, T, Hv, Dv, device=device, dtype=dtype)
    for rounds, chunk in ((2, 128), (3, 50), (1, 64)):
        words = {"hashes": ap.lsh(qk, rounds, 8), "chunk": chunk, "mask": rt.FULL if mode == "full" else rt.CAUSAL}
        words |= {"strict": mode == "strict", "duplicates": "counted" if mode == "counted" else "once"}
        # a key's gradient is the sum over the queries of two chunks in each round, and over the heads of a group
        compare(lambda *x, **y: ap.reformer(*x, **words, **y), [qk, v], dtype, 2 * chunk * rounds * H // Hv)  # noqa: B023


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("H", "Hk", "D"), [(4, 4, 128), (4, 1, 64), (2, 1, 40)])
@pytest.mark.parametrize("mask", [rt.CAUSAL, rt.FULL], ids=str)
def test_routing(mask: rt.Mask, H: int, Hk: int, D: int, dtype: torch.dtype, device: torch.device) -> None:
    q = torch.randn(2, 600, H, D, device=device, dtype=dtype)
    k, v = (torch.randn(2, 700, Hk, D, device=device, dtype=dtype) for _ in range(2))
    centroids = torch.randn(H, 6, D, device=device)
    for width in (50, 256):
        _, members = ap.routing(q, k, v, centroids, mask, width=width)
        run = lambda *x, **y: ap.routing(*x, centroids, mask, members=members, **y)[0]  # noqa: B023, E731
        compare(run, [q, k, v], dtype, 6 * width * H // Hk)


def test_a_nan_stays_with_those_who_see_it(device: torch.device) -> None:
    qk, v = (torch.randn(1, 500, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    hashes = ap.lsh(qk, 2, 8)
    qk[0, 90, 0, 1], v[0, 60, 1, 2] = float("nan"), float("inf")
    found, due = (ap.reformer(qk, v, rt.CAUSAL, hashes=hashes, chunk=32, backend=x) for x in ("triton", "eager"))
    assert torch.equal(found.isfinite().all(-1), due.isfinite().all(-1))


def test_a_call_takes_the_kernels_and_compiles(device: torch.device) -> None:
    qk, v = (torch.randn(1, 600, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    names: list[str] = []
    with launch.observe(names.append):
        due = ap.reformer(qk, v, rt.CAUSAL, rounds=2, chunk=64)
    assert "_forward" in names
    torch._dynamo.reset()
    program = torch.compile(lambda qk, v: ap.reformer(qk, v, rt.CAUSAL, rounds=2, chunk=64, seed=0), fullgraph=True)
    torch.testing.assert_close(program(qk, v), due, atol=2e-2, rtol=2e-2)
