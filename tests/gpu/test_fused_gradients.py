"""Fused operations with gradients on a GPU: by their formulas in fp64, rows of all sizes, bit-equal runs, CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from rooftile import fused
from rooftile.runtime import launch
from tests.conformance.fused_cases import DTYPES, OPERATIONS, answers, check, inputs, losses

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (257, 4096), (5000, 896), (3, 16384), (0, 64), (2, 65536), (7, 41)])
def test_results_and_gradients(name: str, rows: int, size: int, dtype: torch.dtype) -> None:
    check(name, inputs(name, rows, size, dtype, "cuda"))


def test_rows_past_the_kernels() -> None:
    for name in ("rms norm", "softmax"):
        check(name, inputs(name, 2, 262144, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("name", OPERATIONS)
def test_runs_are_bit_equal_and_run_kernels(name: str) -> None:
    leaves = inputs(name, 3000, 1024, torch.bfloat16, "cuda")
    seen: list[str] = []
    with launch.observe(seen.append):
        first = answers(OPERATIONS[name].call, leaves)
    assert len(seen) >= 2
    for x, y in zip(first, answers(OPERATIONS[name].call, leaves), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("V", [50257, 128256, 151936])
def test_linear_cross_entropy(V: int) -> None:
    T, D = 2049, 256
    x, w = torch.randn(T, D, device="cuda").bfloat16(), (torch.randn(V, D, device="cuda") * 0.05).bfloat16()
    target = torch.randint(V, (T,), device="cuda")
    target[::5] = -100
    upstream = torch.randn(T, device="cuda")
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    found = fused.linear_cross_entropy(*leaves, target, reduction="none", label_smoothing=0.1, softcap=30.0, z_loss=1e-4)
    exact = [t.double().requires_grad_() for t in (x, w)]
    due = losses(exact[0] @ exact[1].T, target, 0.1, 30.0, 1e-4)
    torch.testing.assert_close(found.double(), due, rtol=1e-3, atol=1e-2)
    grads = torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(due, exact, upstream.double())
    for a, b in zip(*grads, strict=True):
        assert (a.double() - b).norm() <= 0.01 * b.norm()


def test_nothing_waits_for_the_device() -> None:
    """A capture fails where something waits."""
    x, w = torch.randn(512, 256, device="cuda", requires_grad=True), torch.randn(5000, 256, device="cuda", requires_grad=True)
    target = torch.randint(5000, (512,), device="cuda")

    def step() -> list[torch.Tensor]:
        return list(torch.autograd.grad(fused.linear_cross_entropy(x, w, target), (x, w)))

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        due = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    for a, b in zip(found, due, strict=True):
        torch.testing.assert_close(a, b)


def test_memory_beyond_inputs_and_gradients() -> None:
    T, D, V = 8192, 1024, 128256
    x, w = (torch.randn(rows, D, device="cuda").bfloat16().requires_grad_() for rows in (T, V))
    target = torch.randint(V, (T,), device="cuda")
    # memory of cuBLAS, which it keeps
    torch.mm(x.detach(), x.detach().T)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused.linear_cross_entropy(x, w, target).backward()
    peak = torch.cuda.max_memory_allocated() - before - x.grad.nbytes - w.grad.nbytes
    # the fp32 sum of the weight's gradient, and logits of some rows
    assert peak <= 4 * V * D + (1 << 29)


def test_targets_outside_give_nan_and_read_nothing() -> None:
    x = torch.randn(3, 100, device="cuda")
    found = fused.cross_entropy(x, torch.tensor([5, 100, -7], device="cuda"), reduction="none")
    assert found[0].isfinite()
    assert found[1:].isnan().all()
