"""Weights that somebody else changes between steps: beside them, low bits of other weights would be wrong, or NaN."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile.optim import AdamW


@pytest.mark.parametrize(
    "change",
    [
        lambda p, x: p.detach().copy_(x),
        lambda p, x: _holder(p).load_state_dict({"w": x}),
        lambda p, x: p.data.copy_(x),
        lambda p, x: setattr(p, "data", x),
        lambda p, x: p.data.mul_(0).add_(x),
    ],
    ids=["copy_", "load_state_dict", "data.copy_", "data", "data.mul_"],
)
@pytest.mark.parametrize("shape", [(70, 90), (3, 5, 7, 40), (1,)])
def test_weights_that_are_set_by_hand_have_no_low_bits(change: Callable, shape: tuple[int, ...]) -> None:
    p = nn.Parameter(torch.randn(shape).bfloat16())
    if p.ndim == 4:
        p = nn.Parameter(p.detach().to(memory_format=torch.channels_last))
    optimiser = AdamW([p], lr=1e-4, master="split", weight_decay=0.0)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        optimiser.step()
    assert optimiser.state[p]["rest"].any()
    x = torch.randn(shape).bfloat16()
    # a zero beside a negative rest would be NaN
    x.view(-1)[0] = 0.0
    change(p, x)
    assert torch.equal(optimiser.master_weight(p), x.float())
    wide = nn.Parameter(x.float())
    peer = AdamW([wide], lr=1e-4, weight_decay=0.0)
    peer.state[wide] = {name: optimiser.state[p][name].clone() for name in ("step", "exp_avg", "exp_avg_sq")}
    p.grad = torch.randn_like(p)
    wide.grad = p.grad.float()
    optimiser.step()
    peer.step()
    assert torch.equal(optimiser.master_weight(p), wide)


def _holder(p: nn.Parameter) -> nn.Module:
    holder = nn.Module()
    holder.w = p
    return holder


def test_only_the_neighbours_of_a_weight_that_is_set_lose_low_bits() -> None:
    p = nn.Parameter(torch.randn(3 * 2048 + 5).bfloat16())
    optimiser = AdamW([p], lr=1e-4, master="split")
    p.grad = torch.randn_like(p)
    optimiser.step()
    before = optimiser.master_weight(p)
    p.data[2048 * 2 - 1] = 0.0
    changed = optimiser.master_weight(p)
    assert torch.equal(changed[2048:4096], p.detach().float()[2048:4096])
    for same in (slice(0, 2048), slice(4096, None)):
        assert torch.equal(changed[same], before[same])
    # two weights that change places, and one that gets its old value back
    p.data[[0, 1]] = p.data[[1, 0]]
    assert torch.equal(optimiser.master_weight(p)[:2048], p.detach().float()[:2048])
    p.data[[0, 1]] = p.data[[1, 0]]
    assert torch.equal(optimiser.master_weight(p)[:2048], before[:2048])


def test_weights_may_be_loaded_before_their_optimiser_or_after_it() -> None:
    p = nn.Parameter(torch.randn(40, 70).bfloat16())
    optimiser = AdamW([p], lr=1e-4, master="split")
    for _ in range(3):
        p.grad = torch.randn_like(p)
        optimiser.step()
    saved, due = copy.deepcopy(optimiser.state_dict()), optimiser.master_weight(p)
    for first in (True, False):
        q = nn.Parameter(torch.zeros_like(p))
        other = AdamW([q], lr=1e-4, master="split")
        if first:
            q.data.copy_(p)
        other.load_state_dict(saved)
        if not first:
            q.data.copy_(p)
        assert torch.equal(other.master_weight(q), due)
    # states of an earlier version have no sums: the weights count as their own
    for state in saved["state"].values():
        del state["sums"]
    other = AdamW([p], lr=1e-4, master="split")
    other.load_state_dict(saved)
    assert torch.equal(other.master_weight(p), due)


@pytest.mark.parametrize("master", [None, "split"])
def test_weights_that_no_longer_fit_their_states(master: str | None) -> None:
    p = nn.Parameter(torch.randn(4, 3).bfloat16())
    optimiser = AdamW([p], master=master)
    p.grad = torch.ones_like(p)
    optimiser.step()
    p.data = torch.zeros(5, 3).bfloat16()
    p.grad = torch.ones_like(p)
    with pytest.raises(rt.InvalidInput, match=r"a weight is torch.bfloat16 \(5, 3\) and its states are for .* \(4, 3\)"):
        optimiser.step()
    if master:
        p.grad, p.data = None, torch.zeros(4, 3)
        p.grad = torch.ones_like(p)
        with pytest.raises(rt.InvalidInput, match=r"a weight is torch.float32 \(4, 3\) and its states are for torch.bfloat16"):
            optimiser.step()


@pytest.mark.parametrize("master", [None, "split"])
def test_weights_that_lie_in_another_order_since(master: str | None) -> None:
    """A model that is moved to channels_last keeps its states and its low bits, also over a state dict."""
    given = [torch.randn(3, 5, 4, 30).bfloat16() for _ in range(6)]
    p, moved = (nn.Parameter(torch.ones(3, 5, 4, 30).bfloat16()) for _ in range(2))
    whole, other = (AdamW([x], lr=1e-3, master=master) for x in (p, moved))
    for n, gradient in enumerate(given):
        if n == 2:
            moved.data = moved.data.to(memory_format=torch.channels_last)
        if n == 4:
            saved = other.state_dict()
            moved = nn.Parameter(moved.detach().contiguous())
            other = AdamW([moved], lr=1e-3, master=master)
            other.load_state_dict(saved)
        p.grad, moved.grad = gradient, gradient.clone()
        whole.step()
        other.step()
        assert torch.equal(whole.master_weight(p), other.master_weight(moved))
        assert other.state[moved]["exp_avg"].stride() == moved.stride()
