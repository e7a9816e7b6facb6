"""The kernels of decode steps of a few tokens on a GPU: against fp64, and in a graph whose products read weights early."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from rooftile import moe
from rooftile.fused.norm import Weights, add_norm, normalise
from rooftile.fused.one_row import project
from rooftile.moe import routing as plain
from rooftile.runtime import launch
from rooftile.runtime.early_weights import weights_stay
from tests.moe.by_hand import mixture

pytestmark = pytest.mark.gpu

# experts and router of published models
ROUTERS = {
    "mixtral": (8, {"active": 2, "normalise": True}),
    "deepseek": (64, {"active": 6}),
    "qwen3": (128, {"active": 8, "normalise": True, "round_gates": True}),
    "gpt-oss": (32, {"active": 4, "score": "chosen softmax"}),
    "v2": (160, {"active": 6, "groups": 8, "active_groups": 3, "scale": 16.0}),
    "v3": (
        256,
        {
            "active": 8, "groups": 8, "active_groups": 4, "group_score": "sum of best two", "score": "sigmoid",
            "normalise": True, "scale": 2.5,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("N", [1, 3, 40, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_choose_what_plain_operations_choose(name: str, dtype: torch.dtype, N: int, device: torch.device) -> None:
    E, words = ROUTERS[name]
    torch.manual_seed(0)
    u, centroids = torch.randn(N, 1400, device=device).to(dtype), (torch.randn(E, 1400, device=device) / 20).to(dtype)
    tensors = {"bias": torch.randn(E, device=device) / 9, "logit_bias": torch.randn(E, device=device).to(dtype)}
    # a token of NaN is chosen for as a sort chooses
    u[N // 2, 5] = float("nan") if N > 1 else 1.0
    with mock.patch.object(plain, "runs_kernels", return_value=False):
        due = moe.route(u, centroids, **words, **tensors)
    for deterministic in (False, True):
        found = moe.route(u, centroids, **words, **tensors, deterministic=deterministic)
        # two scores that differ in their last bits may change places
        differ = (found.experts != due.experts).any(-1)
        assert differ.sum() <= N // 100
        assert torch.equal(found.experts[N // 2], due.experts[N // 2])
        torch.testing.assert_close(found.scores, due.scores, rtol=1e-5, atol=1e-7, equal_nan=True)
        tolerance = {"rtol": 1e-2, "atol": 1e-3} if words.get("round_gates") else {"rtol": 1e-5, "atol": 1e-7}
        torch.testing.assert_close(found.gates[~differ], due.gates[~differ], **tolerance, equal_nan=True)


@pytest.mark.parametrize("N", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["silu", "clamped", "relu2"])
def test_experts_of_few_tokens_equal_python(activation: str, dtype: torch.dtype, N: int, device: torch.device) -> None:
    torch.manual_seed(0)
    d, h, E, K, s = 1300, 700, 9, 3, 530
    n = 1 if activation == "relu2" else 2
    made = {
        "up": (E, n * h, d), "down": (E, d, h), "shared_up": (n * s, d), "shared_down": (d, s), "up_bias": (E, n * h),
        "down_bias": (E, d), "shared_gate": (d,),
    }  # fmt: skip
    given = {name: (torch.randn(shape, device=device) / shape[-1] ** 0.5).to(dtype) for name, shape in made.items()}
    chosen = torch.stack([torch.randperm(E, device=device)[:K] for _ in range(N)]).int()
    u, gates = torch.randn(N, d, device=device).to(dtype), torch.rand(N, K, device=device)
    y = moe.experts(u, moe.Routing(chosen, gates), activation=activation, **given)
    due = mixture(u.double(), chosen, gates.double(), activation=activation, **{name: x.double() for name, x in given.items()})
    # sums of up to 1,300 products, in fp32
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), due, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def test_a_graph_gives_the_bits_of_waiting_launches(device: torch.device) -> None:
    """A chain of small kernels and products that read their weights early, with and without waits for each launch."""
    torch.manual_seed(0)
    d, h, E, layers = 1024, 512, 16, []
    for _ in range(12):
        shapes = [(3 * d, d), (d, 3 * d), (E, d), (E, 2 * h, d), (E, d, h), (2 * h, d), (d, h)]
        layers.append([(torch.randn(shape, device=device) / shape[-1] ** 0.5).bfloat16() for shape in shapes])
    norm = Weights((torch.rand(d, device=device) + 0.5).bfloat16(), None, 1e-5, plus_one=False)

    def run(x: Tensor) -> Tensor:
        stream = x.clone()
        y = normalise(stream, norm)
        for wide, narrow, centroids, up, down, shared_up, shared_down in layers:
            y, stream = add_norm(project(project(y, wide), narrow), stream, norm, None)
            routing = moe.route(y, centroids, active=2)
            y = moe.experts(y, routing, up, down, shared_up=shared_up, shared_down=shared_down)
            y, stream = add_norm(y, stream, norm, None)
        return stream

    x = torch.randn(1, d, device=device).bfloat16()
    run(x)
    graph = torch.cuda.CUDAGraph()
    with weights_stay(), torch.cuda.graph(graph):
        found = run(x)
    for turn in range(20):
        x.copy_(torch.randn(1, d, device=device) * (turn + 1))
        torch.cuda.synchronize()
        graph.replay()
        got = found.clone()
        with launch.observe(lambda name: torch.cuda.synchronize()):
            due = run(x)
        assert torch.equal(got, due), turn
