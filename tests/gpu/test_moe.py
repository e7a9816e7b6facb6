"""Experts on a GPU: values and gradients, no wait of the host, the same bits in every run, a captured graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import moe
from tests.approximate.tolerance import assert_within
from tests.moe.test_experts import ACTIVATIONS, DTYPES, run, tensors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", ["none", "odd", "aligned"])
def test_experts_equal_python(size: str, activation: str, dtype: torch.dtype) -> None:
    experts, given = tensors(size, activation)
    experts = experts.cuda()
    given = {name: (x if name == "gates" else x.to(dtype).float()).cuda() for name, x in given.items()}
    exact = run(experts, given, torch.float64, activation, by_hand=True)
    plain = run(experts, given, dtype, activation, backend="eager")
    for deterministic in (False, True):
        found = run(experts, given, dtype, activation, deterministic=deterministic)
        assert_within(found, exact, plain, dtype, terms=256)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_host_waits_for_nothing(dtype: torch.dtype) -> None:
    layer = rt.nn.DeepSeekMoE(64, 16, 3, 1, 48, device="cuda", dtype=dtype, selection_bias=True)
    x = torch.randn(100, 64, device="cuda", dtype=dtype)
    cu = torch.tensor([0, 40, 100], dtype=torch.int32, device="cuda")

    def step() -> None:
        routing = layer.route(x)
        loss = layer(x, routing).float().square().mean() + moe.balance_loss(routing, cu=cu)
        loss.backward()
        moe.update_bias(layer.selection_bias, routing)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_deterministic_token_does_not_depend_on_neighbours(dtype: torch.dtype) -> None:
    layer = rt.nn.DeepSeekMoE(64, 16, 3, 1, 48, device="cuda", dtype=dtype, deterministic=True)
    x = torch.randn(300, 64, device="cuda", dtype=dtype)
    with torch.no_grad():
        due = layer(x)
        for rows in (slice(0, 1), slice(299, 300), slice(3, 130)):
            assert torch.equal(layer(x[rows]), due[rows])


def gradients(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(layer(x).float().square().sum(), list(layer.parameters())))


def test_every_run_has_the_same_bits() -> None:
    layer = rt.nn.DeepSeekMoE(64, 16, 3, 1, 48, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    due = gradients(layer, x)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(gradients(layer, x), due, strict=True))


def test_a_captured_graph_follows_the_tokens() -> None:
    layer = rt.nn.DeepSeekMoE(64, 16, 3, 1, 48, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("N", "E", "K"), [(1, 64, 6), (200, 16, 3), (700, 8, 2), (3000, 8, 4)])
def test_every_tile_of_the_kernels_equals_the_definition(N: int, E: int, K: int, dtype: torch.dtype) -> None:
    u, up, down = (torch.randn(shape, device="cuda", dtype=dtype) / 8 for shape in ((N, 200), (E, 2 * 104, 200), (E, 200, 104)))
    # one expert has most rows, and the last expert has no row
    scores = torch.rand(N, E, device="cuda") + torch.arange(E, device="cuda").eq(0) - 9 * torch.arange(E, device="cuda").eq(E - 1)
    routing = moe.Routing(scores.topk(K).indices.int(), torch.rand(N, K, device="cuda"))
    due = moe.experts(u.double(), routing, up.double(), down.double(), backend="eager")
    plain = moe.experts(u, routing, up, down, backend="eager")
    for deterministic in (False, True):
        y = moe.experts(u, routing, up, down, backend="triton", deterministic=deterministic)
        assert (y - due).norm() <= 2 * (plain - due).norm() + 1e-6 * due.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("N", "E", "K"), [(1, 64, 6), (200, 16, 3), (700, 8, 2), (3000, 8, 4)])
def test_every_tile_of_the_backward_equals_the_definition(N: int, E: int, K: int, dtype: torch.dtype) -> None:
    """Rows of one, several and many tiles; all of them on few experts, and experts without rows, whose gradients are 0."""
    shapes = {"u": (N, 200), "up": (E, 2 * 104, 200), "down": (E, 200, 104), "up_bias": (E, 208), "down_bias": (E, 200)}
    given = {name: torch.randn(shape, device="cuda", dtype=dtype) / 8 for name, shape in shapes.items()}
    scores = torch.rand(N, E, device="cuda") + torch.arange(E, device="cuda").eq(0) - 9 * torch.arange(E, device="cuda").eq(E - 1)
    chosen, gates, dy = scores.topk(K).indices.int(), torch.rand(N, K, device="cuda"), torch.randn(N, 200, device="cuda")

    def gradients(wide: torch.dtype, **options: object) -> tuple[Tensor, ...]:
        u, up, down, up_bias, down_bias = leaves = [x.to(wide).requires_grad_() for x in given.values()]
        g = gates.to(torch.promote_types(wide, torch.float32)).requires_grad_()
        y = moe.experts(u, moe.Routing(chosen, g), up, down, up_bias=up_bias, down_bias=down_bias, **options)
        return torch.autograd.grad(y, [g, *leaves], dy.to(dtype).to(wide))

    exact, plain = gradients(torch.float64, backend="eager"), gradients(dtype, backend="eager")
    for deterministic in (False, True):
        found = gradients(dtype, backend="triton", deterministic=deterministic)
        for x, usual, due in zip(found, plain, exact, strict=True):
            assert (x - due).norm() <= 2 * (usual - due).norm() + 2e-6 * due.norm()
            assert (x[due.flatten(1).eq(0).all(1)] == 0).all()
