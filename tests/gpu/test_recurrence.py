"""Linear attention's kernels on a GPU: against the definition in fp64, packed, in a CUDA graph, and bit-equal from run to run."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from tests.approximate.tolerance import assert_within, gradients

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def inputs(T: int, H: int, Hk: int, D: int, Dv: int, dtype: torch.dtype, B: int = 1) -> list[Tensor]:
    return [torch.randn(B, T, h, d, device="cuda").to(dtype) for h, d in ((H, D), (Hk, D), (Hk, Dv))]


def answer(tensors: list[Tensor], state: list[Tensor], dtype: torch.dtype, path: str, **options) -> dict[str, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {n: x.to(dtype).requires_grad_() for n, x in zip("qkv", tensors, strict=True)}
    leaves |= {n: x.to(wide).requires_grad_() for n, x in zip("Sz", state, strict=True)}
    q, k, v, *given = leaves.values()
    o, (S, z) = ap.linear_with_state(q, k, v, options.pop("mask"), state=tuple(given), backend=path, **options)
    outputs = {"o": o, "last S": S, "last z": z}
    return outputs | gradients(outputs, leaves, tensors[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("mask", [rt.CAUSAL, rt.FULL], ids=str)
@pytest.mark.parametrize(
    ("T", "H", "Hk", "D", "Dv"), [(1025, 4, 4, 64, 64), (2111, 2, 2, 128, 128), (1500, 5, 1, 64, 128), (130, 16, 1, 80, 96)]
)
def test_kernels_equal_chunks_in_fp64(
    T: int, H: int, Hk: int, D: int, Dv: int, mask: rt.Mask, normalise: bool, dtype: torch.dtype
) -> None:
    """The chunks are held to the definition on a CPU; the definition's sums would take T x D x Dv numbers here."""
    tensors = inputs(T, H, Hk, D, Dv, dtype)
    state = [torch.rand(1, Hk, D, Dv, device="cuda"), torch.rand(1, Hk, D, device="cuda")]
    options = {"mask": mask, "normalise": normalise}
    found = answer(tensors, state, dtype, "triton", **options)
    exact = answer(tensors, state, torch.float64, "tiled", **options)
    plain = answer(tensors, state, dtype, "tiled", **options)
    assert_within(found, exact, plain, dtype, terms=T * H // Hk)


def test_packed_sequences_and_repeats_give_the_same_bits() -> None:
    lengths = [1000, 24, 0, 2000, 1]
    q, k, v = (x[0].requires_grad_() for x in inputs(sum(lengths), 8, 2, 64, 64, torch.bfloat16))
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    o = ap.linear(q, k, v, rt.CAUSAL, cu=cu)
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    for x, y in zip(grads, torch.autograd.grad(o, (q, k, v), do), strict=True):
        assert torch.equal(x, y)
    for start, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        one = ap.linear(*(x[None, start:stop] for x in (q, k, v)), rt.CAUSAL)[0]
        assert torch.equal(one, o[start:stop])


def test_a_cuda_graph_and_no_wait_for_the_device() -> None:
    q, k, v = inputs(3000, 8, 8, 128, 128, torch.bfloat16)
    due = ap.linear(q, k, v, rt.CAUSAL)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ap.linear(q, k, v, rt.CAUSAL)
    graph.replay()
    assert torch.equal(found, due)
    with warnings.catch_warnings():
        # PyTorch remarks that this mode is a prototype
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        ap.linear(q, k, v, rt.CAUSAL)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["positive", "trigonometric"])
def test_performer_runs_in_chunks(kind: str) -> None:
    q, k, v = inputs(500, 4, 2, 64, 64, torch.bfloat16)
    features = ap.Features.draw(64, 128, kind=kind, device="cuda")
    found = ap.performer(q / 4, k / 4, v, rt.CAUSAL, features=features)
    exact = ap.performer(*(x.double() for x in (q / 4, k / 4, v)), rt.CAUSAL, features=features)
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [rt.CAUSAL, rt.FULL], ids=str)
@pytest.mark.parametrize(("T", "H", "Hk", "D"), [(1025, 2, 2, 128), (700, 4, 1, 64)])
def test_gradients_of_performer_equal_chunks_in_fp64(T: int, H: int, Hk: int, D: int, mask: rt.Mask, dtype: torch.dtype) -> None:
    features = ap.Features.draw(D, 256, device="cuda")
    tensors = inputs(T, H, Hk, D, D, dtype)
    answers = []
    for kind, path in ((dtype, "triton"), (torch.float64, "tiled"), (dtype, "tiled")):
        leaves = dict(zip("qkv", (x.to(kind).requires_grad_() for x in tensors), strict=True))
        outputs = {"o": ap.performer(*leaves.values(), mask, features=features, backend=path)}
        answers.append(outputs | gradients(outputs, leaves, dtype))
    assert_within(*answers, dtype, terms=T * H // Hk)
