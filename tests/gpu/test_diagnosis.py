"""Diagnoses on a GPU: bounds that are known, the step as a CUDA graph, and the timer under them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rooftile as rt
from rooftile.diagnosis.experiments.call import RepeatableCall
from rooftile.diagnosis.experiments.intensity import references
from rooftile.diagnosis.experiments.intensity.ladder import Ladder
from rooftile.diagnosis.experiments.intensity.multiply_adds import expected
from rooftile.diagnosis.experiments.step import replayed_share
from rooftile.diagnosis.experiments.timing import timer_for
from rooftile.diagnosis.output.json_rows import Op
from rooftile.errors import Unsupported

pytestmark = pytest.mark.gpu

aten = torch.ops.aten


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32, device="cuda").to(dtype)


def leading(program: Callable[[], Any], budget: float) -> Op:
    return max(rt.diagnose(program, budget=budget).ops, key=lambda op: op.time_us)


def product(m: int, k: int, n: int, dtype: torch.dtype) -> Callable[[], Any]:
    x, y = random(m, k, dtype=dtype), random(k, n, dtype=dtype)
    return lambda: x @ y


def elementwise() -> Callable[[], Any]:
    x = random(1 << 27)
    return lambda: x + 1.5


def gather() -> Callable[[], Any]:
    table, rows = random(1 << 19, 512), torch.randint(0, 1 << 19, (1 << 18,), device="cuda")
    return lambda: F.embedding(rows, table)


def special() -> Callable[[], Any]:
    # lgamma takes less time than its bytes here; the incomplete gamma function is a series of hundreds of operations
    x = torch.rand(1 << 25, device="cuda") + 1
    return lambda: torch.igamma(x, x)


@pytest.mark.parametrize(
    ("make", "bound", "units"),
    [
        (elementwise, "memory", {"HBM"}),
        (gather, "memory", {"HBM"}),
        (lambda: product(16384, 16, 16384, torch.bfloat16), "memory", {"HBM"}),
        (lambda: product(8, 16384, 16384, torch.bfloat16), "memory", {"HBM"}),
        (lambda: product(8192, 8192, 8192, torch.bfloat16), "compute", {"tensor"}),
        (lambda: product(4096, 4096, 4096, torch.float64), "compute", {"fp64"}),
        (special, "compute", {"special", "fp32"}),
    ],
    ids=["addition", "gather", "product, K = 16", "product, 8 rows", "product", "fp64 product", "igamma"],
)
def test_the_bound_and_its_unit(make: Callable[[], Callable[[], Any]], bound: str, units: set[str | None]) -> None:
    op = leading(make(), budget=20)
    if make is gather and op.bound == "balanced":
        # beside a fast main memory, rows from the cache take nearly as long
        assert op.experiments["cache"]["gain"] < 0.3
        return
    assert (op.bound, op.unit in units) == (bound, True), f"{op.bound} {op.unit}: {op.confirmed_by}"
    assert op.confidence in ("measured", "confirmed"), op.confirmed_by


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_a_training_step_of_attention_is_cut_without_reading_past_an_end(kernel: str) -> None:
    q, k, v = (random(8, 12, 512, 64).requires_grad_() for _ in range(3))

    def step() -> None:
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, kernel)):
            F.cross_entropy(F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(0, 2).float(), classes).backward()

    classes = torch.randint(0, 64, (8 * 12 * 512,), device="cuda")
    found = rt.diagnose(step, budget=5)
    torch.cuda.synchronize()
    backward = [op for op in found.ops if "attention_backward" in op.op]
    assert backward
    assert all(op.experiments["cache"]["gain"] is not None for op in backward), [op.confirmed_by for op in backward]


def test_a_backward_of_attention_is_not_tried_with_what_another_kernel_gave() -> None:
    q, k, v = (random(1, 12, 1024, 64, dtype=torch.float32).requires_grad_() for _ in range(3))

    def step() -> None:
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
            F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1).sum().backward()

    found = rt.diagnose(step, budget=5)
    torch.cuda.synchronize()
    assert any("attention_backward" in op.op for op in found.ops)


def test_a_step_is_found_on_the_gpu_wherever_its_tensors_are_held() -> None:
    class Held:
        def __init__(self) -> None:
            self.weights = {"deep": [random(256, 256)]}

        def step(self) -> torch.Tensor:
            return self.weights["deep"][0] @ self.weights["deep"][0]

    held = [Held()]
    assert rt.diagnose(lambda: held[0].step(), budget=1).machine["type"] == "cuda"


def test_a_kernel_of_one_block_is_latency() -> None:
    x = random(1, 256, dtype=torch.float32)
    op = leading(lambda: torch.softmax(x, -1), budget=5)
    assert op.bound in ("latency", "overhead"), op


def test_a_copy_on_the_device_is_work() -> None:
    x = random(1 << 27)
    found = rt.diagnose(lambda: x.clone(), budget=2)
    assert found.step.busy_us is not None
    assert found.step.busy_us > 0.5 * found.step.time_us
    assert found.step.idle_us["copy"] < 0.1 * found.step.time_us


def test_a_step_takes_the_time_that_it_takes_after_others() -> None:
    """The host works for a while before each step's first kernel, and the device is at the last step meanwhile."""
    x = random(8192, 8192)

    def step() -> None:
        time.sleep(0.004)
        for _ in range(12):
            x @ x

    found = rt.diagnose(step, budget=3)
    kernels_us = sum(op.time_us for op in found.ops)
    assert kernels_us > 8_000
    assert found.step.time_us < kernels_us + 2_000
    assert found.step.bound == "compute"


def test_many_small_kernels_are_overhead_and_a_graph_takes_it_away() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2000):
            x = x + 1
        return x

    found = rt.diagnose(step, random(8), budget=5)
    assert found.step.bound == "overhead"
    graph_us = found.step.experiments["graph_us"]
    assert graph_us is not None
    assert graph_us < 0.7 * found.step.time_us
    assert found.step.overhead_share == pytest.approx(1 - graph_us / found.step.time_us)


def test_a_step_that_cannot_be_captured_says_why(device: torch.device) -> None:
    x = random(64)
    with pytest.raises(Unsupported, match="the step cannot be captured: "):
        replayed_share(lambda: x.sum().item(), device)
    # and the device is as before
    assert torch.equal(x + 0, x)
    found = rt.diagnose(lambda: x.sum().item(), budget=2)
    assert found.step.experiments["graph_us"] is None
    assert "cannot be captured" in found.step.experiments["why_not"]["graph"]


def test_a_step_that_is_another_while_it_is_captured_says_so() -> None:
    """Transformers builds a mask while a graph is captured, which it leaves out otherwise."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() if torch.cuda.is_current_stream_capturing() else x) + 1

    found = rt.diagnose(step, random(64), budget=1)
    assert found.step.experiments["graph_us"] is None
    assert "+1 aten::sin" in found.step.experiments["why_not"]["graph"]


def test_an_optimisers_range_is_no_work() -> None:
    weights = [random(64, 64, dtype=torch.float32).requires_grad_() for _ in range(100)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimiser = torch.optim.AdamW(weights, foreach=False)
    found = rt.diagnose(lambda: optimiser.step(), budget=2)
    assert found.step.bound == "overhead"
    assert found.step.busy_us is not None
    assert found.step.busy_us < 0.5 * found.step.time_us


def test_a_training_step_is_captured_and_undone(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device)
    before = [p.clone() for p in model.parameters()]
    found = rt.diagnose(model, random(32, 64, dtype=torch.float32), backward=True, budget=2)
    assert found.step.experiments["graph_us"] is not None, found.step.experiments["why_not"]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [3, 48])
def test_added_multiply_adds_are_computed(dtype: torch.dtype, count: int) -> None:
    x = random(37, 65, dtype=dtype)
    made = Ladder(RepeatableCall(aten.mul.Tensor, (x, 2.0))).rung(count).run()[0]
    near = 0.01 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(made.double(), expected(x * 2, count), atol=near, rtol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_references_can_be_told_apart(dtype: torch.dtype, device: torch.device) -> None:
    found = references._measure(dtype, timer_for(device), device)
    # the faster the memory, the more of added arithmetic is seen beside an addition
    assert found.addition < 0.5
    assert found.multiply_adds > 2 / 3


def test_cold_is_slower_than_warm(device: torch.device) -> None:
    timer, call = timer_for(device), RepeatableCall(aten.add.Tensor, (random(1 << 22), 1.0))
    cold, warm = (min(timer.once(call, cold=is_cold) for _ in range(10)) for is_cold in (True, False))
    assert cold > 1.15 * warm


def test_the_host_is_not_timed(device: torch.device) -> None:
    """A call that the host takes 5 ms to queue keeps the device busy for microseconds."""
    x = random(1024)

    def slow(y: torch.Tensor) -> torch.Tensor:
        time.sleep(5e-3)
        return y + 1

    assert timer_for(device).once(RepeatableCall(slow, (x,)), cold=True) < 1000
