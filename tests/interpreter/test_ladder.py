"""The rung of the ladder that Triton's interpreter can run computes attention."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_1s_schedule_is_attention(causal: bool) -> None:
    from rooftile_lab.bench.ladder import first

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 256, 2, 32) for _ in range(3))
    o, lse = first.forward(q, k, v, causal)
    due, due_lse = rt.attention_with_lse(q, k, v, rt.CAUSAL if causal else rt.FULL, backend="eager")
    torch.testing.assert_close(o, due, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, due_lse, rtol=1e-4, atol=1e-4)
