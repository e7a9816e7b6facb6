"""AdamW on a GPU: one launch, no wait, PyTorch's weights, and a step in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from rooftile.optim import AdamW
from rooftile.runtime import launch

pytestmark = pytest.mark.gpu
SHAPES = ((4096, 513), (7,), (300, 40))


def weights(dtype: torch.dtype, device: torch.device) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in SHAPES]


def give(params: list[torch.nn.Parameter], n: int) -> None:
    generator = torch.Generator(params[0].device).manual_seed(n)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, device=p.device).to(p.dtype)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_it_is_torchs(clip: float | None, device: torch.device) -> None:
    ours, theirs = weights(torch.float32, device), weights(torch.float32, device)
    made, peer = AdamW(ours, lr=1e-2, clip_norm=clip), torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    seen: list[str] = []
    for n in range(50):
        give(ours, n)
        give(theirs, n)
        if clip:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        with launch.observe(seen.append):
            made.step()
        peer.step()
    assert seen == ["_adamw"] * 50
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=50 * 2**-23, atol=50 * 2**-24)


def test_a_split_master_is_an_fp32_master(device: torch.device) -> None:
    ours = weights(torch.bfloat16, device)
    wide = [torch.nn.Parameter(p.detach().float()) for p in ours]
    made, peer = AdamW(ours, lr=1e-5, master="split"), AdamW(wide, lr=1e-5)
    for n in range(50):
        give(ours, n)
        for x, y in zip(ours, wide, strict=True):
            y.grad = x.grad.float()
        made.step()
        peer.step()
    for x, y in zip(ours, wide, strict=True):
        assert torch.equal(made.master_weight(x), y)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits(device: torch.device) -> None:
    params = weights(torch.bfloat16, device)
    made = AdamW(params, clip_norm=1.0, master="split", lr=torch.tensor(1e-3, device=device), capturable=True)
    give(params, 0)
    made.step()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        made.step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("inside", [False, True])
def test_a_captured_step(inside: bool, device: torch.device) -> None:
    """Also where gradients are made inside of the graph, at addresses that no step has seen."""
    ours, theirs = weights(torch.bfloat16, device), weights(torch.bfloat16, device)
    made, peer = (AdamW(params, lr=1e-2, capturable=True, clip_norm=1.0, master="split") for params in (ours, theirs))
    data = torch.ones((), device=device)

    def backward(params: list[torch.nn.Parameter]) -> None:
        for p in params:
            p.grad = None
        sum((p.float().sin() * data).sum() for p in params).backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backward(ours)
        made.step()
    torch.cuda.current_stream().wait_stream(stream)
    backward(theirs)
    peer.step()
    graph = torch.cuda.CUDAGraph()
    if inside:
        for p in ours:
            p.grad = None
        with torch.cuda.graph(graph):
            backward(ours)
            made.step()
    else:
        with torch.cuda.graph(graph):
            made.step()
    for _ in range(3):
        graph.replay()
        if inside:
            backward(theirs)
        peer.step()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(made.master_weight(x), peer.master_weight(y), rtol=1e-5, atol=1e-6)


def test_weights_that_are_set_by_hand(device: torch.device) -> None:
    """Also a model that is moved to another order in memory after its first steps."""
    ours, same = weights(torch.bfloat16, device), weights(torch.bfloat16, device)
    made, peer = AdamW(ours, lr=1e-4, master="split"), AdamW(same, lr=1e-4, master="split")
    for n in range(3):
        give(ours, n)
        give(same, n)
        made.step()
        peer.step()
    before = made.master_weight(ours[0])
    ours[0].data[0, :100] = 0.0
    changed = made.master_weight(ours[0])
    assert torch.equal(changed.view(-1)[2048:], before.view(-1)[2048:])
    assert torch.equal(changed.view(-1)[:2048], ours[0].detach().float().view(-1)[:2048])
    give(ours, 3)
    give(same, 3)
    made.step()
    peer.step()
    assert made.master_weight(ours[0]).isfinite().all()
    assert torch.equal(made.master_weight(ours[0]).view(-1)[2048:], peer.master_weight(same[0]).view(-1)[2048:])
    assert torch.equal(made.master_weight(ours[2]), peer.master_weight(same[2]))
    images, plain = (torch.nn.Parameter(torch.ones(8, 16, 5, 7, device=device).bfloat16()) for _ in range(2))
    made, peer = AdamW([images], lr=1e-4, master="split"), AdamW([plain], lr=1e-4, master="split")
    for n in range(4):
        if n == 2:
            images.data = images.data.to(memory_format=torch.channels_last)
        give([images], n)
        plain.grad = images.grad.clone(memory_format=torch.contiguous_format)
        made.step()
        peer.step()
        assert torch.equal(made.master_weight(images), peer.master_weight(plain))
