"""HSTU attention's kernels compile without a GPU: on matrix instructions, with what a program may have."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile import recommend
from tests.kernels.recorded import SHARED, compiled, recorded


@pytest.mark.parametrize(
    ("dim", "bias", "placed", "dtype", "sm"),
    [
        (64, True, False, torch.bfloat16, 80),
        (128, True, True, torch.bfloat16, 80),
        (128, False, False, torch.bfloat16, 90),
        (128, True, False, torch.bfloat16, 90),
        (128, True, True, torch.bfloat16, 90),
        (256, True, False, torch.bfloat16, 90),
        (64, True, False, torch.float32, 90),
    ],
)
def test_forward_and_gradients(dim: int, bias: bool, placed: bool, dtype: torch.dtype, sm: int) -> None:
    q, k, v = (torch.randn(1536, 4, dim, dtype=dtype, requires_grad=True) for _ in range(3))
    words = {}
    if bias:
        tables = (torch.randn(n, requires_grad=True) for n in (512, 33))
        words = {"bias": recommend.RelativeBias(*tables, recommend.time_edges(33)), "times": torch.arange(1536)}
    if placed:
        words["positions"] = torch.arange(1536) * 2
    cu = torch.tensor([0, 512, 1536])
    with recorded(sm) as launches:
        y = recommend.hstu_attention(q, k, v, cu, alpha=0.1, targets=4, backend="triton", **words)
        y.sum().backward()
    assert sorted(one.name for one in launches.values()) == ["_forward", "_gradients_of_keys", "_gradients_of_rows"]
    for one in launches.values():
        found = compiled(one, sm)
        assert found.shared <= SHARED[sm]
        assert found.matrix or dtype == torch.float32
        assert found.hot_spills == 0


def test_what_finishes_the_kernels_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call launches the kernels for Hopper, targets' own pairs, and what computes again where a NaN was met."""
    pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")
    from rooftile.recommend.hstu.hopper import launch

    monkeypatch.setattr(launch, "processors", lambda device: 132)
    monkeypatch.setattr(launch, "counter", lambda device: torch.zeros(2, dtype=torch.int32))
    q, k, v = (torch.randn(1536, 4, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 512, 1536], dtype=torch.int32)
    with recorded(90) as launches:
        y = recommend.hstu_attention(q, k, v, cu, alpha=0.1, targets=4, backend="hopper")
        y.sum().backward()
    names = [one.name for one in launches.values()]
    assert names == [
        "hstu_forward", "_own_outputs", "_forward",
        "hstu_gradients_of_keys", "hstu_gradients_of_rows", "_own_gradients", "_gradients_of_rows", "_gradients_of_keys",
    ]  # fmt: skip
    for one in launches.values():
        if one.name.startswith("_own"):
            assert compiled(one, 90).shared <= SHARED[90]
