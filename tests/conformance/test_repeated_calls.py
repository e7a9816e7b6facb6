"""Repeated calls are checked and computed like the first: the cache must have no visible effect."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt
from rooftile.exact import dispatch, ops
from rooftile.exact.cases import Case
from rooftile.exact.masks import CAUSAL, FULL
from rooftile.exact.spec import NO_OPTIONS, CallSettings, Options
from rooftile.runtime.devices import arch

CASE = Case(name="repeated", tags=frozenset(), T=70, S=70, dim=32)


def refused(backend: str, device: torch.device) -> bool:
    """Returns whether the backend refuses these calls; if so, asserts its reason."""
    if not dispatch.verdicts(CASE.problem(arch(device)).spec)[backend]:
        return False
    with pytest.raises(rt.Unsupported):
        rt.attention(*inputs(device), backend=backend)
    return True


def inputs(device: torch.device, *shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape or (2, 70, 2, 32), device=device) for _ in range(3)]


def assert_right(o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask=FULL, **options) -> None:
    due = rt.attention(q.double(), k.double(), v.double(), mask, backend="eager", **options)
    assert (o.double() - due).abs().max() < 1e-5


def test_a_repeated_call_reads_its_own_data(backend: str, device: torch.device) -> None:
    if refused(backend, device):
        return
    for _ in range(3):
        q, k, v = inputs(device)
        assert_right(rt.attention(q, k, v, backend=backend), q, k, v)
        o, lse = rt.attention_with_lse(q, k, v, backend=backend)
        assert_right(o, q, k, v)
        assert torch.allclose(lse, torch.logsumexp(torch.einsum("bthd,bshd->bhts", q, k) * 32**-0.5, -1), atol=1e-5)


def test_a_plain_call_can_be_remembered(device: torch.device) -> None:
    """Without a cache hit, every call would be checked again: correct, but slow."""
    q, k, v = inputs(device)
    key = ops.signature(q, k, v, CAUSAL, NO_OPTIONS, CallSettings())
    assert key is not None
    assert ops.signature(*inputs(device), CAUSAL, NO_OPTIONS, CallSettings()) == key
    assert ops.signature(q, k, v, CAUSAL, NO_OPTIONS, CallSettings(deterministic=True)) not in (None, key)
    with_sinks = ops.signature(q, k, v, CAUSAL, Options(sinks=torch.zeros(2, device=device)), CallSettings())
    assert with_sinks not in (None, key)
    # 4 bytes off the alignment that kernels were compiled for
    off = torch.randn(q.numel() + 1, device=device)[1:].view(q.shape)
    assert ops.signature(off, k, v, CAUSAL, NO_OPTIONS, CallSettings()) is None
    assert ops.signature(q.requires_grad_(), k, v, CAUSAL, NO_OPTIONS, CallSettings()) not in (None, key)


def test_what_differs_from_an_earlier_call_counts(backend: str, device: torch.device) -> None:
    if refused(backend, device):
        return
    q, k, v = inputs(device)
    rt.attention(q, k, v, backend=backend)
    assert_right(rt.attention(q, k, v, backend=backend, scale=0.7), q, k, v, scale=0.7)
    if backend != "sdpa" or device.type == "cpu":
        assert_right(rt.attention(q, k, v, CAUSAL, backend=backend), q, k, v, CAUSAL)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert_right(rt.attention(*heads_first, backend=backend), *heads_first)
    mixed = (q, heads_first[1], v)
    assert_right(rt.attention(*mixed, backend=backend), *mixed)
    longer = inputs(device, 2, 71, 2, 32)
    assert_right(rt.attention(*longer, backend=backend), *longer)
    misaligned = [torch.randn(q.numel() + 1, device=device)[1:].view(q.shape) for _ in range(3)]
    assert_right(rt.attention(*misaligned, backend=backend), *misaligned)
    sliced = [torch.cat([x, x], dim=-1)[..., ::2] for x in inputs(device)]
    assert_right(rt.attention(*sliced, backend=backend), *sliced)


def test_gradients_flow_after_calls_without(backend: str, device: torch.device) -> None:
    if refused(backend, device):
        return
    q, k, v = inputs(device)
    for _ in range(2):
        rt.attention(q, k, v, backend=backend)
    q.requires_grad_()
    rt.attention(q, k, v, backend=backend).sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()
    with torch.no_grad():
        assert not rt.attention(q, k, v, backend=backend).requires_grad


def test_a_repeated_call_has_its_own_gradients(backend: str, device: torch.device) -> None:
    if refused(backend, device):
        return
    for wants in ((0,), (1, 2), (), (0, 1, 2), (0,), (), (2,)):
        tensors = inputs(device)
        for n in wants:
            tensors[n].requires_grad_()
        o = rt.attention(*tensors, CAUSAL, backend=backend)
        assert o.requires_grad == bool(wants)
        if not wants:
            continue
        leaves = [tensors[n] for n in wants]
        do = torch.randn_like(o)
        found = torch.autograd.grad(o, leaves, do)
        wide = [x.detach().double().requires_grad_() for x in tensors]
        due = torch.autograd.grad(rt.attention(*wide, CAUSAL, backend="eager"), [wide[n] for n in wants], do.double())
        for x, y in zip(found, due, strict=True):
            assert (x.double() - y).abs().max() < 1e-4


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_wrong_call_is_refused_after_right_ones(backend: str, device: torch.device) -> None:
    if refused(backend, device):
        return
    q, k, v = inputs(device)
    for _ in range(2):
        rt.attention(q, k, v, scale=1.0, backend=backend)
    with pytest.raises(rt.InvalidInput, match="scale is True; must be a number"):
        rt.attention(q, k, v, scale=True, backend=backend)
    with pytest.raises(rt.InvalidInput, match=r"k is torch\.float16; q is torch\.float32"):
        rt.attention(q, k.half(), v, scale=1.0, backend=backend)
    with pytest.raises(rt.InvalidInput, match="v is nested or sparse"):
        rt.attention(q, k, v.to_sparse(), scale=1.0, backend=backend)
    with pytest.raises(rt.InvalidInput, match="k is None"):
        rt.attention(q, None, v, scale=1.0, backend=backend)
    with pytest.raises(rt.InvalidInput, match="mask is"):
        rt.attention(q, k, v, [], scale=1.0, backend=backend)
    with pytest.raises(rt.InvalidInput, match="dropout is None"):
        rt.attention(q, k, v, scale=1.0, dropout=None, backend=backend)
    with pytest.raises(rt.InvalidInput, match="scale is"):
        rt.attention(q, k, v, scale=[1.0], backend=backend)


def test_a_repeated_call_under_autocast_and_inference_mode(backend: str, device: torch.device) -> None:
    if refused(backend, device):
        return
    tensors = [x.bfloat16().requires_grad_() for x in inputs(device)]
    due = rt.attention(*tensors, backend=backend)
    due_grads = torch.autograd.grad(due.float().square().sum(), tensors)
    wide = [x.detach().float() for x in tensors]
    for _ in range(2):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert torch.equal(rt.attention(*wide, backend=backend), due)
            o = rt.attention(*tensors, backend=backend)
        assert torch.equal(o, due)
        grads = torch.autograd.grad(o.float().square().sum(), tensors)
        for x, y in zip(grads, due_grads, strict=True):
            assert torch.allclose(x.float(), y.float(), atol=1e-2)
        with torch.inference_mode():
            assert torch.equal(rt.attention(*tensors, backend=backend), due)
        with torch.autocast(device.type, dtype=torch.float16):
            assert rt.attention(*tensors, backend=backend).dtype == torch.float16


def test_saved_tensors_may_come_back_with_other_strides(backend: str, device: torch.device) -> None:
    """A hook may keep what the backward needs elsewhere, and give it back contiguous."""
    if refused(backend, device):
        return
    tensors = [torch.randn(2, 2, 70, 32, device=device).transpose(1, 2).requires_grad_() for _ in range(3)]
    grads = []
    for hooks in (False, False, True):
        pack = (lambda x: x.contiguous().clone()) if hooks else (lambda x: x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            o = rt.attention(*tensors, backend=backend, deterministic=backend != "sdpa")
        grads.append(torch.autograd.grad(o, tensors, torch.ones_like(o)))
    for again in grads[1:]:
        for x, y in zip(grads[0], again, strict=True):
            assert torch.allclose(x, y, atol=1e-5)
