"""Numbers that change from call to call: torch.compile makes symbols of them, and traces each call whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import fused, moe
from rooftile import recurrent as rec

X, W = torch.linspace(-1, 1, 64).view(1, 4, 2, 8), torch.linspace(0.5, 1, 8)
STEPS = torch.ones(1, 4, 2)
CALLS: dict[str, Callable[[float], Tensor]] = {
    "attention": lambda number: rt.attention(X, X, X, scale=number),
    "gated norm": lambda number: fused.rms_norm_gated(X, X, W, eps=number),
    "gated_delta": lambda number: rec.gated_delta(X, X, X, -STEPS, STEPS, scale=number, return_state=False),
    "route": lambda number: moe.route(X[0, :, 0], X[0, :, 1], active=2, scale=number).gates,
    "ssd": lambda number: rec.ssd(X, STEPS, -torch.ones(2), X, X, dt_limit=(0.0, number), return_state=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_number_may_change_under_a_compiler(name: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
    for number in (0.1, 0.2, 0.35):
        torch.testing.assert_close(compiled(number), CALLS[name](number))
    for number in (float("nan"), float("inf")) if name in ("attention", "gated_delta") else ():
        with pytest.raises(rt.InvalidInput, match=f"scale is {number}; must be"):
            CALLS[name](number)
