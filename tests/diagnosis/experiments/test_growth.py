"""More arithmetic: along a product's side, a convolution's channels, or over the pairs that a mask leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rooftile.diagnosis.counts import count
from rooftile.diagnosis.experiments.call import RepeatableCall
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.experiments.intensity import growth
from rooftile.errors import Unsupported
from tests.diagnosis.simulated import FIXED_US, SimulatedTimer, simulate

aten = torch.ops.aten
MEMORY = 1 << 30


def swept(call: RepeatableCall) -> Any:
    timer = SimulatedTimer()
    counted = timer.counted(call)
    time_us = timer.once(call, cold=True)
    arithmetic_us = counted.flops / 50e3 + FIXED_US
    return growth.sweep(call, timer, time_us, arithmetic_us, counted.flops, Deadline(), MEMORY)


def convolution(channels: int, outer: int, size: int, *, groups: int = 1, transposed: bool = False) -> RepeatableCall:
    shape = (channels, outer // groups, 3, 3) if transposed else (outer, channels // groups, 3, 3)
    args = (torch.randn(2, channels, size, size), torch.randn(shape), torch.randn(outer), [1, 1], [1, 1], [1, 1])
    return RepeatableCall(aten.convolution.default, (*args, transposed, [0, 0], groups))


def backward_of_convolution(channels: int, outer: int, size: int, groups: int = 1) -> RepeatableCall:
    args = (torch.randn(2, outer, size, size), torch.randn(2, channels, size, size), torch.randn(outer, channels // groups, 3, 3))
    rest = ([outer], [1, 1], [1, 1], [1, 1], False, [0, 0], groups, [True, True, True])
    return RepeatableCall(aten.convolution_backward.default, (*args, *rest))


def attention(length: int, *, causal: bool) -> RepeatableCall:
    tensors = [torch.randn(2, 3, length, 32) for _ in range(3)]
    return RepeatableCall(aten._scaled_dot_product_flash_attention_for_cpu.default, (*tensors, 0.0, causal))


def backward_of_attention(length: int, *, causal: bool) -> RepeatableCall:
    forward = attention(length, causal=causal)
    out, lse = forward.run()
    args = (torch.randn_like(out), *forward.tensors, out, lse, 0.0, causal)
    return RepeatableCall(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, args)


@pytest.mark.parametrize(
    "make",
    [
        lambda: convolution(32, 24, 20),
        lambda: convolution(24, 24, 20, groups=3, transposed=True),
        lambda: convolution(24, 16, 20, transposed=True),
        lambda: backward_of_convolution(24, 32, 20),
        lambda: attention(1024, causal=True),
        lambda: attention(1024, causal=False),
        lambda: backward_of_attention(640, causal=True),
        lambda: backward_of_attention(640, causal=False),
    ],
    ids=[
        "convolution", "in groups", "transposed", "its backward", "causal", "full", "causal backward", "full backward",
    ],
)  # fmt: skip
def test_arithmetic_that_takes_all_the_time_is_seen(make: Callable[[], RepeatableCall], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the simulated machine a product of these sizes takes as long as its arithmetic."""
    simulate(monkeypatch)
    found = swept(make())
    assert len(found.time_us) > 1
    assert found.added_flops[-1] > 0
    # kernels compute tiles on the diagonal whole, of which the counts have half
    assert 0.75 < found.slope < 1.55


@pytest.mark.parametrize("make", [convolution, backward_of_convolution])
def test_a_convolution_in_groups_has_more_images(make: Callable[..., RepeatableCall], monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch)
    call = make(24, 24, 20, groups=24)
    (places,) = growth._choices(call)
    grown = call.on(growth._enlarged(call, places, 2))
    before, after = (count(one.function, one.args, one.kwargs, one.run()) for one in (call, grown))
    assert after.flops == 2 * before.flops
    assert [dim for _, dim in places] == [0] * len(places)


def test_a_mask_that_is_taken_away_adds_pairs_and_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch)
    call = backward_of_attention(640, causal=True)
    seen: list[RepeatableCall] = []
    timer = SimulatedTimer()
    original = timer.used
    monkeypatch.setattr(timer, "used", lambda one, **how: (seen.append(one), original(one, **how))[1])
    growth.sweep(call, timer, 8e3, 8e3, 1e6, Deadline(), MEMORY)
    counts = {bool(one.args[7]): count(one.function, one.args, one.kwargs, one.run()) for one in seen}
    assert counts[True].bytes == counts[False].bytes
    assert counts[False].flops == pytest.approx(2 * counts[True].flops, rel=0.01)
    assert call.args[7] is True


def test_a_mask_as_a_tensor_and_unequal_lengths_are_left_alone() -> None:
    q, k = torch.randn(1, 2, 300, 16), torch.randn(1, 2, 200, 16)
    function = aten._scaled_dot_product_flash_attention_for_cpu.default
    unequal = RepeatableCall(function, (q, k, k, 0.0, True))
    masked = RepeatableCall(function, (q, q, q, 0.0, False), {"attn_mask": torch.zeros(300, 300)})
    for call in (unequal, masked):
        with pytest.raises(Unsupported, match="more queries would see other keys under its mask"):
            growth.sweep(call, SimulatedTimer(), 100.0, 90.0, 1e6, Deadline(), MEMORY)
