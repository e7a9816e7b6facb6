"""The recurrences' kernels on a GPU: against plain operations in fp64, the same bits in every run, in a captured graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile import recurrent as rec

pytestmark = pytest.mark.gpu
ERRORS = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 3e-3}
LENGTHS = {"dense": None, "packed": [0, 3, 3, 700, 701, 2000, 2100]}
D = torch.float64


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=D, device="cuda")


def ssd(front: tuple[int, ...], count: int, P: int, N: int) -> tuple[Any, dict[str, Tensor]]:
    H, G = 8, 2
    given = {
        "x": rand(*front, H, P), "dt": rand(*front, H) - 2, "A": -torch.rand(H, dtype=D, device="cuda") * 4,
        "B": rand(*front, G, N), "C": rand(*front, G, N), "D": rand(H), "dt_bias": rand(H), "state": rand(count, H, P, N),
    }  # fmt: skip
    return rec.ssd, given


def gated(front: tuple[int, ...], count: int, P: int, N: int) -> tuple[Any, dict[str, Tensor]]:
    run, given = ssd(front, count, P, N)
    return run, given | {"z": rand(*given["x"].shape)}


def conv(front: tuple[int, ...], count: int, P: int, N: int) -> tuple[Any, dict[str, Tensor]]:
    return rec.causal_conv, {"x": rand(*front, P), "weight": rand(P, 4), "bias": rand(P), "tail": rand(count, P, 3)}


def delta(front: tuple[int, ...], count: int, P: int, N: int) -> tuple[Any, dict[str, Tensor]]:
    Hk, Hv = 2, 4
    given = {
        "q": rand(*front, Hk, N), "k": rand(*front, Hk, N), "v": rand(*front, Hv, P),
        "g": -torch.rand(*front, Hv, dtype=D, device="cuda"), "beta": torch.rand(*front, Hv, dtype=D, device="cuda"),
        "state": rand(count, Hv, N, P),
    }  # fmt: skip
    return rec.gated_delta, given


def scan(front: tuple[int, ...], count: int, P: int, N: int) -> tuple[Any, dict[str, Tensor]]:
    given = {
        "x": rand(*front, P), "dt": rand(*front, P) - 2, "A": -torch.rand(P, N, dtype=D, device="cuda") * 4, "B": rand(*front, N),
        "C": rand(*front, N), "D": rand(P), "z": rand(*front, P), "dt_bias": rand(P), "state": rand(count, P, N),
    }  # fmt: skip
    return rec.selective_scan, given


NARROW = {"x", "B", "C", "z", "q", "k", "v", "tail"}
KINDS = {"ssd": ssd, "gated": gated, "conv": conv, "delta": delta, "scan": scan}
SIZES = [
    ("ssd", 64, 128),
    ("ssd", 64, 64),
    ("ssd", 40, 16),
    ("ssd", 128, 256),
    ("gated", 64, 128),
    ("conv", 200, 0),
    ("delta", 128, 128),
    ("delta", 48, 64),
    ("scan", 200, 16),
    ("scan", 70, 5),
]
# head dims of values and keys, of which some are below the smallest tile
DIMS = [(1, 1), (5, 8), (8, 5), (17, 16), (48, 32), (64, 100), (64, 64), (128, 128)]


def narrowed(given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(dtype if name in NARROW else torch.float32) for name, x in given.items()}


@pytest.mark.parametrize("dtype", list(ERRORS), ids=str)
@pytest.mark.parametrize("layout", LENGTHS)
@pytest.mark.parametrize(("kind", "P", "N"), SIZES)
def test_kernels_equal_plain_operations(kind: str, P: int, N: int, layout: str, dtype: torch.dtype) -> None:
    ends = LENGTHS[layout]
    cu = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cuda")
    front, count = ((3, 1500), 3) if ends is None else ((ends[-1],), len(ends) - 1)
    run, given = KINDS[kind](front, count, P, N)
    given = narrowed(given, dtype)
    if kind in ("ssd", "gated") and dtype == torch.float32 and N > 128:
        given = narrowed(KINDS[kind](front, count, P, 128)[1], dtype)
    found = [run(**given, cu=cu, backend="triton") for _ in range(4)]
    due = run(**{name: x.double() for name, x in given.items()}, cu=cu, backend="tiled")
    for n, right in enumerate(due):
        error = (found[0][n].double() - right).norm() / right.norm()
        assert error <= ERRORS[dtype], float(error)
        assert all(torch.equal(found[0][n], again[n]) for again in found[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_in_a_graph_give_the_rows_of_the_whole(dtype: torch.dtype) -> None:
    T, S = 6, 5
    run, given = ssd((S, T), S, 64, 128)
    given = narrowed(given, dtype)
    due, last = run(**given, backend="triton")
    states = torch.zeros(S + 3, *given["state"].shape[1:], device="cuda")
    slots = torch.tensor([6, 1, 2, 0, 5], dtype=torch.int32, device="cuda")
    each = {name: given[name][:, 0].clone() for name in ("x", "dt", "B", "C")}
    fixed = {name: given[name] for name in ("A", "D", "dt_bias")}
    rec.ssd_step(states, **each, **fixed, slots=slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rec.ssd_step(states, **each, **fixed, slots=slots)
    states[slots.long()] = given["state"]
    for t in range(T):
        for name, x in each.items():
            x.copy_(given[name][:, t])
        graph.replay()
        assert (y.float() - due[:, t].float()).norm() <= ERRORS[dtype] * due[:, t].float().norm()
    assert (states[slots.long()] - last).norm() <= ERRORS[dtype] * last.norm()
    assert not states[[3, 4, 7]].any()


@pytest.mark.parametrize("name", ["dt", "x", "B"])
def test_a_nan_reaches_all_later_tokens_of_its_sequence_and_no_other_sequence(name: str) -> None:
    cu = torch.tensor([0, 300, 700, 900], dtype=torch.int32, device="cuda")
    run, given = ssd((900,), 3, 64, 128)
    given = narrowed(given, torch.bfloat16)
    given[name][500] = float("nan")
    y, last = run(**given, cu=cu, backend="triton")
    assert y[500:700].isnan().all()
    assert last[1].isnan().all()
    assert not y[:300].isnan().any()
    assert not y[700:].isnan().any()
    assert not last[[0, 2]].isnan().any()
    # a chunk has 64 tokens
    assert not y[300:436].isnan().any()


def gradients(run: Any, given: dict[str, Tensor], cu: Tensor | None, backend: str) -> list[Tensor]:
    """The outputs, and the gradients of all tensors from random gradients of both outputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    outputs = run(**leaves, cu=cu, backend=backend)
    generator = torch.Generator("cuda").manual_seed(0)
    dues = [torch.randn(y.shape, generator=generator, device="cuda", dtype=D).to(torch.bfloat16).to(y.dtype) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, list(leaves.values()), dues)]


def check_gradients(run: Any, given: dict[str, Tensor], cu: Tensor | None, dtype: torch.dtype) -> None:
    given = narrowed(given, dtype)
    found = [gradients(run, given, cu, "triton") for _ in range(4)]
    due = gradients(run, {name: x.double() for name, x in given.items()}, cu, "tiled")
    for n, right in enumerate(due):
        error = (found[0][n].double() - right).norm() / right.norm()
        assert error <= 2 * ERRORS[dtype], (n, float(error))
        assert all(torch.equal(found[0][n], again[n]) for again in found[1:])


@pytest.mark.parametrize("dtype", list(ERRORS), ids=str)
@pytest.mark.parametrize("layout", LENGTHS)
@pytest.mark.parametrize(("kind", "P", "N"), [("ssd", 64, 128), ("conv", 200, 0), ("delta", 128, 128), ("scan", 200, 16)])
def test_gradients_equal_plain_operations(kind: str, P: int, N: int, layout: str, dtype: torch.dtype) -> None:
    ends = None if LENGTHS[layout] is None else [0, 3, 3, 300, 301, 700]
    cu = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cuda")
    front, count = ((2, 600), 2) if ends is None else ((ends[-1],), len(ends) - 1)
    check_gradients(*KINDS[kind](front, count, P, N), cu, dtype)


@pytest.mark.parametrize("dtype", list(ERRORS), ids=str)
@pytest.mark.parametrize(("P", "N"), DIMS)
def test_the_delta_rule_has_any_head_dims(P: int, N: int, dtype: torch.dtype) -> None:
    check_gradients(*delta((2, 130), 2, P, N), None, dtype)


def test_two_warpgroups_of_the_delta_rule_share_keys() -> None:
    """Many sequences fill the chip, so on Hopper a program walks 128 columns of values."""
    check_gradients(*delta((70, 70), 70, 128, 128), None, torch.bfloat16)


@pytest.mark.parametrize("dtype", list(ERRORS), ids=str)
@pytest.mark.parametrize("layout", LENGTHS)
@pytest.mark.parametrize(("kind", "P", "N"), [case for case in SIZES if case[0] in ("ssd", "gated")])
def test_gradients_of_ssd_equal_those_of_plain_operations(kind: str, P: int, N: int, layout: str, dtype: torch.dtype) -> None:
    ends = LENGTHS[layout]
    cu = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cuda")
    front, count = ((3, 700), 3) if ends is None else ((ends[-1],), len(ends) - 1)
    run, given = KINDS[kind](front, count, P, min(N, 128) if dtype == torch.float32 else N)
    given = narrowed(given, dtype)
    dy, d_last = rand(*given["x"].shape), rand(*given["state"].shape)

    def gradients(given: dict[str, Tensor], backend: str) -> tuple[Tensor, ...]:
        leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
        y, last = run(**leaves, cu=cu, backend=backend)
        return torch.autograd.grad((y, last), list(leaves.values()), (dy.to(y.dtype), d_last.to(last.dtype)))

    found = [gradients(given, "triton") for _ in range(4)]
    due = gradients({name: x.double() for name, x in given.items()}, "tiled")
    for n, right in enumerate(due):
        error = (found[0][n].double() - right).norm() / right.norm()
        assert error <= 2 * ERRORS[dtype], float(error)
        assert all(torch.equal(found[0][n], again[n]) for again in found[1:])


def test_compiled_and_autocast_calls_give_the_same() -> None:
    run, given = ssd((2, 300), 2, 64, 128)
    given = {name: x.float() for name, x in given.items()}
    due = run(**narrowed(given, torch.bfloat16))
    compiled = torch.compile(run, fullgraph=True)(**narrowed(given, torch.bfloat16))
    with torch.autocast("cuda", torch.bfloat16):
        cast = run(**given)
    for a, b, c in zip(due, compiled, cast, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
