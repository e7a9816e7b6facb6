"""`rt.fuse` on a GPU: losses and gradients in bf16 by the rule of two, a compiled step, and a step in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt
from tests.integrations.test_fuse import FAMILIES, batch, made

pytestmark = pytest.mark.gpu


def step(model: torch.nn.Module, **words) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**{name: x.cuda() for name, x in batch().items()}, **words).loss
    loss.backward()
    return loss.detach(), {name: p.grad.float() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16(name: str) -> None:
    exact, plain, fused = made(name).cuda(), made(name, torch.bfloat16).cuda(), made(name, torch.bfloat16).cuda()
    exact.load_state_dict(plain.state_dict())
    rt.fuse(fused, verbose=False)
    (loss, due), (_, usual), (found, grads) = step(exact), step(plain), step(fused)
    assert abs(found - loss) <= 0.02 * loss
    for key, grad in grads.items():
        error, allowed = ((x - due[key]).abs().mean() for x in (grad, usual[key]))
        assert error <= 2 * allowed + 1e-3 * due[key].abs().mean(), key


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_step_in_a_graph(name: str) -> None:
    """A capture proves that nothing waits for the device."""
    model = made(name, torch.bfloat16).cuda()
    rt.fuse(model, verbose=False)
    tokens = batch()["input_ids"].cuda()
    words = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad()
            model(**words).loss.backward()
    torch.cuda.current_stream().wait_stream(stream)
    due = model(**words).loss.detach().clone()
    graph = torch.cuda.CUDAGraph()
    model.zero_grad()
    with torch.cuda.graph(graph):
        loss = model(**words).loss
        loss.backward()
    graph.replay()
    torch.testing.assert_close(loss.detach(), due)
