"""Kernels that overlap with their neighbours compute what they compute alone, in a graph whose products read weights early."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.fused import gated_quantised
from rooftile.fused.norm import Weights, add_norm, normalise
from rooftile.numerics import QuantisedRows
from rooftile.runtime.dependent_launch import overlaps
from rooftile.runtime.early_weights import weights_stay
from rooftile.weights import multiply

pytestmark = pytest.mark.gpu

LAYERS, HIDDEN, FFN = 12, 1024, 2816


@pytest.fixture
def layers(device: torch.device) -> list[tuple[Weights, rt.QuantisedWeight, rt.QuantisedWeight]]:
    if not overlaps(device)["PDL"]:
        pytest.skip("the device has no dependent launches")
    torch.manual_seed(0)
    made = []
    for _ in range(LAYERS):
        norm = Weights((torch.rand(HIDDEN, device=device) + 0.5).bfloat16(), None, 1e-5, plus_one=False)
        up, down = (torch.randn(*size, device=device) / size[1] ** 0.5 for size in ((2 * FFN, HIDDEN), (HIDDEN, FFN)))
        made.append((norm, rt.quantise_weight(up.bfloat16(), "fp8"), rt.quantise_weight(down.bfloat16(), "fp8")))
    return made


def _run(layers: list[tuple[Weights, rt.QuantisedWeight, rt.QuantisedWeight]], x: Tensor) -> Tensor:
    """Feed-forwards one after the other; nothing but small kernels and products of few rows."""
    stream = x.clone()
    rows: QuantisedRows = normalise(stream, layers[0][0], "fp8", None)
    for n, (_, up, down) in enumerate(layers):
        inner = gated_quantised(multiply(rows, up, None, out_dtype=x.dtype, deterministic=False, backend=""), "silu", "fp8")
        y = multiply(inner, down, None, out_dtype=x.dtype, deterministic=False, backend="")
        if n + 1 == len(layers):
            return stream + y
        rows, stream = add_norm(y, stream, layers[n + 1][0], None, "fp8", None)
    raise AssertionError("there is a layer")


@pytest.mark.parametrize("count", [1, 3, 16])
@torch.inference_mode()
def test_a_graph_gives_the_bits_of_waiting_launches(
    layers: list[tuple[Weights, rt.QuantisedWeight, rt.QuantisedWeight]], count: int, device: torch.device
) -> None:
    x = torch.randn(count, HIDDEN, device=device, dtype=torch.bfloat16)
    _run(layers, x)
    graph = torch.cuda.CUDAGraph()
    with weights_stay(), torch.cuda.graph(graph):
        found = _run(layers, x)
    for turn in range(20):
        x.copy_(torch.randn(count, HIDDEN, device=device) * (turn + 1))
        # a kernel at a time: each launch waits for the end of all before it
        torch.cuda.synchronize()
        graph.replay()
        got = found.clone()
        due = _run_slowly(layers, x)
        torch.testing.assert_close(got, due, rtol=0, atol=0)


def _run_slowly(layers: list[tuple[Weights, rt.QuantisedWeight, rt.QuantisedWeight]], x: Tensor) -> Tensor:
    from rooftile.runtime import launch

    with launch.observe(lambda name: torch.cuda.synchronize()):
        return _run(layers, x)
