"""HSTU attention's kernels on a GPU: against the definition in fp64, the same bits in every run, in a captured graph."""

from __future__ import annotations

import pytest
import torch

from tests.recommend.hstu_cases import D64, MASKS, Case, case

pytestmark = pytest.mark.gpu
LENGTHS = (700, 0, 3, 40, 300, 129)
TARGETS = (64, 0, 1, 5, 0, 128)
ERRORS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gradients(given: Case, dy: torch.Tensor, backend: str) -> tuple[torch.Tensor, ...]:
    y = given.run(backend)
    return (y, *torch.autograd.grad(y, given.leaves, dy.to(y.dtype)))


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize(("contextual", "targets", "bias"), [(0, None, False), (0, None, True), (2, TARGETS, True)])
@pytest.mark.parametrize("mask", MASKS)
def test_outputs_and_gradients(mask, contextual, targets, bias, dim, dtype) -> None:
    lengths = tuple(n + contextual * (n > 0) for n in LENGTHS)
    given = case(mask, contextual, targets, bias, lengths=lengths, D=dim, Dv=dim).to(dtype, "cuda")
    exact = given.to(D64, "cuda")
    dy = torch.randn(exact.v.shape, dtype=D64, device="cuda").to(dtype)
    first = gradients(given, dy, "triton")
    for found, due in zip(first, gradients(exact, dy.double(), "eager"), strict=True):
        worst = (found.double() - due).abs().max().item()
        assert worst <= ERRORS[dtype] * due.abs().max().item()
    for again, before in zip(gradients(given, dy, "triton"), first, strict=True):
        assert torch.equal(again, before)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("dim", [64, 128])
def test_positions_of_the_callers_own(dim: int, dtype: torch.dtype) -> None:
    """Gaps of all widths: equal to the definition, and the same bits in every run."""
    given = case("causal", 2, TARGETS, True, lengths=tuple(n + 2 * (n > 0) for n in LENGTHS), D=dim, Dv=dim)
    steps = torch.tensor([0, 1, 1, 2, 7, 1 << 40])[torch.randint(0, 6, (len(given.q),))]
    positions = torch.cat([part.cumsum(0) for part in steps.split(given.cu.diff().tolist())])
    given = given._replace(words=given.words | {"positions": positions}).to(dtype, "cuda")
    exact = given.to(D64, "cuda")
    dy = torch.randn(exact.v.shape, dtype=D64, device="cuda").to(dtype)
    first = gradients(given, dy, "triton")
    for found, due in zip(first, gradients(exact, dy.double(), "eager"), strict=True):
        assert (found.double() - due).abs().max().item() <= ERRORS[dtype] * due.abs().max().item()
    for again, before in zip(gradients(given, dy, "triton"), first, strict=True):
        assert torch.equal(again, before)


def test_in_a_captured_graph() -> None:
    given = case("causal", 2, TARGETS, True, lengths=tuple(n + 2 * (n > 0) for n in LENGTHS), D=64, Dv=64).to(
        torch.bfloat16, "cuda"
    )
    with torch.no_grad():
        due = given.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = given.run()
        graph.replay()
    assert torch.equal(y, due)
