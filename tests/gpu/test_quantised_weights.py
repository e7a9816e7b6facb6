"""Weights quantised on a GPU have the bits of those quantised on a CPU."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt
from rooftile.runtime import launch
from tests.interpreter.test_quantised_weights import hostile

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "K", "given"),
    [
        ("fp8", 100, None), ("fp8", 14336, None), ("int8", 100, None), ("w8", 96, None), ("int4", 4096, 32), ("int4", 384, 128),
        ("int4", 90, -1), ("mxfp8", 96, None), ("mxfp4", 4096, None),
    ],
)  # fmt: skip
def test_bits(name: str, K: int, given: int | None, dtype: torch.dtype, device: torch.device) -> None:
    w = hostile(40, K, dtype)
    due = rt.quantise_weight(w, name, group=given)
    seen: list[str] = []
    with launch.observe(seen.append):
        found = rt.quantise_weight(torch.cat([w, w], 1).to(device)[:, :K], name, group=given)
    assert seen == ["_quantise_weight"]
    assert torch.equal(found.codes.cpu().view(torch.uint8), due.codes.view(torch.uint8))
    assert torch.equal(found.scales.cpu().view(torch.uint8), due.scales.view(torch.uint8))


def test_a_weight_that_is_not_finite_is_refused(device: torch.device) -> None:
    w = torch.randn(64, 128, device=device)
    w[7, 100] = torch.inf
    with pytest.raises(rt.InvalidInput, match="weight is inf at row 7, column 100"):
        rt.quantise_weight(w, "int4")
