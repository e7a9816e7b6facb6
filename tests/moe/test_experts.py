"""Experts on sorted rows against token-by-token Python in fp64: values, gradients, uneven choices, known answers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import rooftile as rt
from rooftile import moe
from rooftile.errors import InvalidInput
from rooftile.moe import products
from rooftile.moe.problem import ELSEWHERE
from rooftile.moe.sorting import sort
from tests.approximate.tolerance import assert_within, gradients
from tests.conformance.watching import watching
from tests.moe import by_hand

# N, K, E, d, h, s
SIZES = {
    "none": (0, 2, 4, 8, 5, 3),
    "one": (1, 1, 3, 8, 5, 3),
    "odd": (23, 3, 7, 11, 5, 9),
    "all active": (5, 4, 4, 8, 6, 0),
    "one expert": (9, 1, 1, 8, 6, 3),
    "wide": (35, 2, 5, 40, 33, 17),
    "aligned": (50, 2, 7, 40, 32, 16),
}
ACTIVATIONS = ("silu", "clamped", "relu2")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAMES = ("up_bias", "down_bias", "shared_up", "shared_down", "shared_gate")


def choices(kind: str, N: int, K: int, E: int) -> Tensor:
    """Experts (N, K), each row without a repetition: drawn at random, or all tokens to the same."""
    if kind == "same":
        return torch.arange(E - K, E).expand(N, K)
    return torch.stack([torch.randperm(E)[:K] for _ in range(N)]) if N else torch.zeros(0, K, dtype=torch.int64)


def tensors(size: str, activation: str = "silu", *, everything: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """Experts, and the tensors that have a gradient; large enough that gpt-oss's clamps count."""
    N, K, E, d, h, s = SIZES[size]
    n = 1 if activation == "relu2" else 2
    shapes = {"u": (N, d), "gates": (N, K), "up": (E, n * h, d), "down": (E, d, h)}
    if everything:
        shapes |= {"up_bias": (E, n * h), "down_bias": (E, d)}
        shapes |= {"shared_up": (n * s, d), "shared_down": (d, s), "shared_gate": (d,)} if s else {}
    made = {name: torch.randn(shape) for name, shape in shapes.items()}
    made["up"] = made["up"] * (3 if activation == "clamped" else d**-0.5)
    made["gates"] = made["gates"].abs()
    return choices("random", N, K, E), made


def run(experts: Tensor, given: dict[str, Tensor], dtype: torch.dtype, activation: str, **options) -> dict[str, Tensor]:
    """The output and all gradients, from the same numbers in a dtype; gates are in fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {name: x.to(wide if name == "gates" else dtype).requires_grad_() for name, x in given.items()}
    u, gates, up, down, *rest = leaves.values()
    words = dict(zip([name for name in NAMES if name in given], rest, strict=True))
    if options.pop("by_hand", False):
        y = by_hand.mixture(u, experts, gates, up, down, activation=activation, **words)
        # without tokens it has no graph
        y = y + 0 * sum(x.sum() for x in leaves.values())
    else:
        y = moe.experts(u, moe.Routing(experts, gates), up, down, activation=activation, **words, **options)
        assert y.dtype == dtype
        assert y.is_contiguous()
    return {"y": y} | gradients({"y": y}, leaves, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_sorted_rows_equal_python(size: str, activation: str, dtype: torch.dtype) -> None:
    experts, given = tensors(size, activation)
    given = {name: x if name == "gates" else x.to(dtype).float() for name, x in given.items()}
    exact = run(experts, given, torch.float64, activation, by_hand=True)
    plain = run(experts, given, dtype, activation, backend="eager")
    for options in ({}, {"backend": "tiled", "deterministic": True}):
        found = run(experts, given, dtype, activation, **options)
        assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in plain.items()}
        # the definition adds by experts and autograd rounds each of its steps; sums here are in another order
        assert_within(found, exact, plain, dtype, terms=256)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_definition_equals_python(activation: str) -> None:
    experts, given = tensors("odd", activation)
    found, due = (run(experts, given, torch.float64, activation, **way) for way in ({"backend": "eager"}, {"by_hand": True}))
    for name, x in due.items():
        torch.testing.assert_close(found[name], x, msg=name)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation: str) -> None:
    experts, given = tensors("odd", activation)
    leaves = [x.double().requires_grad_() for x in given.values()]

    def call(u: Tensor, gates: Tensor, up: Tensor, down: Tensor, *rest: Tensor) -> Tensor:
        words = dict(zip(NAMES, rest, strict=True))
        return moe.experts(u, moe.Routing(experts, gates), up, down, activation=activation, **words)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_gradients_flow_through_router_and_experts() -> None:
    u, centroids, up, down = (torch.randn(shape).double().requires_grad_() for shape in ((6, 8), (5, 8), (5, 6, 8), (5, 8, 3)))

    def layer(*x: Tensor) -> Tensor:
        return moe.experts(x[0], moe.route(*x[:2], active=2), *x[2:])

    assert torch.autograd.gradcheck(layer, (u, centroids, up, down))

    def as_defined(*x: Tensor) -> Tensor:
        return moe.experts(x[0], moe.route(*x[:2], active=2), *x[2:], backend="eager")

    assert torch.autograd.gradgradcheck(as_defined, (u, centroids, up, down), fast_mode=True)


def test_a_second_derivative_is_refused_in_a_sentence() -> None:
    experts, given = tensors("odd", everything=False)
    u, gates, up, down = (x.requires_grad_() for x in given.values())
    y = moe.experts(u, moe.Routing(experts, gates), up, down)
    (du,) = torch.autograd.grad(y.square().sum(), u, create_graph=True)
    with pytest.raises(rt.Unsupported, match="double backward through experts on sorted rows; backend='eager' has it"):
        du.sum().backward()


def test_only_what_is_wanted_gets_a_gradient() -> None:
    experts, given = tensors("odd", everything=False)
    u, gates, up, down = given.values()
    gates.requires_grad_()
    with watching() as watch:
        moe.experts(u, moe.Routing(experts, gates), up, down).sum().backward()
    call = watch.calls[-1]
    assert call.name == "experts_backward"
    assert call.arguments[-2] is False
    assert [x.numel() > 0 for x in call.results[2:]] == [False] * 7
    down.requires_grad_()
    moe.experts(u, moe.Routing(experts, gates), up, down).sum().backward()
    assert up.grad is None
    assert down.grad is not None


@pytest.mark.parametrize("kind", ["random", "same"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_deterministic_token_does_not_depend_on_neighbours(kind: str, dtype: torch.dtype) -> None:
    N, K, E, d, h, s = 70, 2, 5, 40, 33, 17
    experts = choices(kind, N, K, E)
    u, gates, up, down, shared_up, shared_down, shared_gate = (
        torch.randn(shape).to(dtype) for shape in ((N, d), (N, K), (E, 2 * h, d), (E, d, h), (2 * s, d), (d, s), (d,))
    )

    def call(rows: slice) -> Tensor:
        routing = moe.Routing(experts[rows], gates[rows])
        return moe.experts(
            u[rows], routing, up, down, shared_up=shared_up, shared_down=shared_down, shared_gate=shared_gate, deterministic=True
        )  # fmt: skip

    due = call(slice(None))
    for rows in (slice(0, 1), slice(69, 70), slice(3, 20), slice(5, 70)):
        assert torch.equal(call(rows), due[rows])
    assert torch.equal(call(slice(None)), due)


def test_what_overflows_in_one_expert_reaches_its_tokens_alone() -> None:
    experts, given = tensors("odd", everything=False)
    lost = (experts == 2).any(-1)
    assert lost.any()
    assert not lost.all()
    for backend in ("tiled", "eager"):
        u, gates, up, down = (x.clone().requires_grad_() for x in given.values())
        with torch.no_grad():
            up[2] = float("nan")
        y = moe.experts(u, moe.Routing(experts, gates), up, down, backend=backend)
        y.sum().backward()
        assert torch.equal(y.isnan().any(-1), lost)
        assert torch.equal(u.grad.isnan().any(-1), lost)
        assert [bool(x.isnan().any()) for x in down.grad] == [e == 2 for e in range(7)]


# known answers


def test_one_expert_of_one_is_a_dense_network() -> None:
    u, up, down = torch.randn(9, 8), torch.randn(1, 12, 8), torch.randn(1, 8, 6)
    routing = moe.route(u, torch.randn(1, 8), active=1)
    assert torch.equal(routing.gates, torch.ones(9, 1))
    gate, linear = (u @ up[0].T).chunk(2, -1)
    torch.testing.assert_close(moe.experts(u, routing, up, down), (functional.silu(gate) * linear) @ down[0].T)


def test_equal_experts_are_a_dense_network_times_the_sum_of_gates() -> None:
    u, up, down = torch.randn(9, 8), torch.randn(12, 8), torch.randn(8, 6)
    routing = moe.route(u, torch.randn(5, 8), active=3)
    gate, linear = (u @ up.T).chunk(2, -1)
    due = routing.gates.sum(-1, keepdim=True) * ((functional.silu(gate) * linear) @ down.T)
    found = moe.experts(u, routing, up.expand(5, 12, 8), down.expand(5, 8, 6))
    torch.testing.assert_close(found, due)


def test_all_experts_of_a_cut_network_are_the_network() -> None:
    # an expert has some of the hidden width: with all of them active and gates of 1 the parts add up
    u, up, down = torch.randn(9, 8), torch.randn(2, 12, 8), torch.randn(8, 12)
    gate, linear = up
    due = (functional.silu(u @ gate.T) * (u @ linear.T)) @ down.T
    parts = torch.cat((gate.view(4, 3, 8), linear.view(4, 3, 8)), 1)
    routing = moe.Routing(torch.arange(4).expand(9, 4), torch.ones(9, 4))
    torch.testing.assert_close(moe.experts(u, routing, parts, down.view(8, 4, 3).transpose(0, 1)), due)


def test_a_shared_network_is_a_routed_expert_that_all_choose() -> None:
    experts, given = tensors("odd", everything=False)
    u, gates, up, down = given.values()
    alone = moe.experts(u, moe.Routing(experts, gates), up, down, shared_up=up[0], shared_down=down[0])
    joined = moe.Routing(
        torch.cat((experts, torch.full((23, 1), 7)), 1), torch.cat((gates, torch.ones(23, 1)), 1)
    )  # fmt: skip
    found = moe.experts(u, joined, torch.cat((up, up[:1])), torch.cat((down, down[:1])))
    torch.testing.assert_close(found, alone)


def test_an_expert_that_is_chosen_twice_counts_twice() -> None:
    experts, given = tensors("odd", everything=False)
    u, gates, up, down = given.values()
    for backend in ("tiled", "eager"):
        twice = moe.experts(u, moe.Routing(experts[:, :1].expand(23, 3), gates), up, down, backend=backend)
        once = moe.experts(u, moe.Routing(experts[:, :1], gates.sum(-1, keepdim=True)), up, down)
        torch.testing.assert_close(twice, once)


# the products of a GPU without kernels, which need no count on the host


@pytest.mark.parametrize("kind", ["random", "same"])
@pytest.mark.parametrize("size", SIZES)
def test_products_in_tiles_equal_products_by_expert(size: str, kind: str) -> None:
    N, K, E, d, h, _ = SIZES[size]
    rows = sort(choices(kind, N, K, E).to(torch.int32), E)
    x, dy, weight = torch.randn(N * K, d), torch.randn(N * K, h), torch.randn(E, h, d)
    due = products.multiply(x, weight, None, rows, False)
    torch.testing.assert_close(products.by_tiles(x, weight, rows), due)
    torch.testing.assert_close(
        products.gradient_by_tiles(dy, x, weight, rows), products.weight_gradient(dy, x, weight, rows)
    )  # fmt: skip
    bias = torch.zeros(E, h)
    torch.testing.assert_close(products.sums_of_tiles(dy, bias, rows), products.bias_gradient(dy, bias, rows))
    tiles, places, expert = products.laid_out(x, rows, E)
    assert torch.equal(tiles.flatten(0, 1)[places], x)
    assert torch.equal(expert[places // products.ROWS], rows.experts.long())


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")
def test_grouped_products_equal_products_by_expert() -> None:
    # the last experts have no rows
    rows = sort(torch.randint(0, 5, (40, 2), dtype=torch.int32), 7)
    x, dy, weight = (torch.randn(shape).bfloat16() for shape in ((80, 16), (80, 24), (7, 24, 16)))
    for a, w in ((x, weight), (dy, weight.mT)):
        due = products.multiply(a, w, None, rows, False)
        torch.testing.assert_close(products.grouped(a, w, rows), due)
    due = products.weight_gradient(dy, x, weight, rows)
    torch.testing.assert_close(products.grouped_gradient(dy, x, weight, rows), due)
    assert (due[5:] == 0).all()


def test_a_row_of_a_tile_does_not_depend_on_the_other_tiles() -> None:
    choice = choices("random", 50, 2, 5).to(torch.int32)
    u, weight = torch.randn(50, 33), torch.randn(5, 20, 33)

    def call(n: int) -> Tensor:
        rows = sort(choice[:n], 5)
        return rows.back(products.by_tiles(u[rows.tokens], weight, rows))

    assert torch.equal(call(7), call(50)[:14])


@pytest.mark.parametrize("way", ["tiled", "eager"])
def test_choices_that_are_elsewhere_add_nothing(way: str) -> None:
    """Two ranks that hold some of the experts each have parts of the sum; a token may have none of its experts on a rank."""
    u, up, down = torch.randn(9, 6), torch.randn(4, 10, 6), torch.randn(4, 6, 5)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(9)]).int()
    chosen[0] = torch.tensor([0, 1])
    gates = torch.rand(9, 2)
    due = moe.experts(u, moe.Routing(chosen, gates), up, down, backend=way)
    parts = []
    for first in (0, 2):
        local = chosen - first
        local[(local < 0) | (local > 1)] = ELSEWHERE
        here = slice(first, first + 2)
        parts.append(moe.experts(u, moe.Routing(local, gates), up[here], down[here], backend=way))
    assert torch.equal(parts[1][0], torch.zeros(6))
    torch.testing.assert_close(parts[0] + parts[1], due)
    with pytest.raises(InvalidInput, match="has values from -1 to"):
        moe.experts(u, moe.Routing(torch.where(local == ELSEWHERE, -1, local), gates), up[here], down[here], backend=way)
