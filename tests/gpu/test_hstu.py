"""HSTU attention's kernels on a GPU: against the definition in fp64, the same bits in every run, in a captured graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rooftile.errors import InvalidInput, Unsupported
from tests.recommend.hstu_cases import D64, MASKS, Case, case

pytestmark = pytest.mark.gpu
LENGTHS = (700, 0, 3, 40, 300, 129)
TARGETS = (64, 0, 1, 5, 0, 128)
ERRORS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gradients(given: Case, dy: torch.Tensor, backend: str | None) -> tuple[torch.Tensor, ...]:
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


@pytest.mark.parametrize(("contextual", "bias"), [(2, True), (0, False)])
def test_in_a_captured_graph(contextual, bias) -> None:
    lengths = tuple(n + contextual * (n > 0) for n in LENGTHS)
    given = case("causal", contextual, TARGETS, bias, lengths=lengths, D=64, Dv=64).to(torch.bfloat16, "cuda")
    words = dict(given.words)
    if bias:
        words["bias"] = replace(words["bias"], edges=words["bias"].edges.cuda())
    with torch.no_grad():
        due = given.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = given._replace(words=words).run()
        graph.replay()
        assert torch.equal(y, due)
        if bias:
            with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(InvalidInput, match="edges is on the CPU"):
                given.run()


@pytest.mark.parametrize("targets", [None, TARGETS])
@pytest.mark.parametrize(("mask", "dim"), [("causal", 32), ("causal", 96), *((mask, dim) for mask in MASKS for dim in (64, 128))])
def test_kernels_for_hopper(mask, targets, dim) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm90 (Hopper)")
    given = case(mask, 0, targets, False, lengths=LENGTHS, D=dim, Dv=dim).to(torch.bfloat16, "cuda")
    if targets is not None and mask in ("window", "both sides", "chunk"):
        with pytest.raises(Unsupported, match="without a bound to the left"):
            given.run("hopper")
        return
    exact = given.to(D64, "cuda")
    dy = torch.randn(exact.v.shape, dtype=D64, device="cuda").bfloat16()
    first = gradients(given, dy, "hopper")
    for found, due in zip(first, gradients(exact, dy.double(), "eager"), strict=True):
        assert (found.double() - due).abs().max() <= 2e-2 * due.abs().max()
    for again, before in zip(gradients(given, dy, "hopper"), first, strict=True):
        assert torch.equal(again, before)


def test_who_is_taken_on_hopper() -> None:
    """Kernels for Hopper where users are long, and others elsewhere: the bits tell."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm90 (Hopper)")
    for lengths, name, other in (((8192,), "hopper", "triton"), (LENGTHS, "triton", "hopper")):
        given = case("causal", 0, None, False, lengths=lengths, D=64, Dv=64).to(torch.bfloat16, "cuda")
        with torch.no_grad():
            found = given.run()
            assert torch.equal(found, given.run(name))
            assert not torch.equal(found, given.run(other))


@pytest.mark.parametrize("targets", [None, TARGETS])
def test_a_hidden_nan_stays_hidden_on_hopper(targets) -> None:
    """Rows before it, and other users, have the numbers that they have without it."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm90 (Hopper)")
    given = case("causal", 0, targets, False, lengths=LENGTHS, D=64, Dv=64).to(torch.bfloat16, "cuda")
    dy = torch.randn(given.v.shape, device="cuda").bfloat16()
    place = 630 if targets is None else 690
    with torch.no_grad():
        for x in given.leaves:
            x[place] = torch.nan
    for found, due in zip(gradients(given, dy, "hopper"), gradients(given, dy, "triton"), strict=True):
        assert torch.equal(found.isnan(), due.isnan())
        assert not due.isnan().all()
        torch.testing.assert_close(found, due, equal_nan=True, rtol=2e-2, atol=2e-2)
