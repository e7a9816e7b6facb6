"""Gradients beside a NaN and beside a sink of -inf: NaN exactly where it is seen, and zeros where nothing is seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.exact.masks import Mask
from tests.grids import swept
from tests.unit.poison import assert_nan_only_where_seen

Window = rt.Window


@pytest.fixture(autouse=True)
def _on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


def or_skip(backend: str, mask: Mask, **options: Any) -> None:
    """Skips a test whose problem a backend refuses."""
    x = torch.zeros(1, 4, 1, 8, requires_grad=True)
    try:
        rt.attention(x, x, x, mask, backend=backend, **options)
    except rt.Unsupported as refusal:
        if backend == "eager" or (backend == "tiled" and x.device.type == "cpu"):
            raise  # these have all of it
        pytest.skip(str(refusal).splitlines()[2].strip())


GRID = [
    (mask, T, S, poisoned, softcap)
    for mask, T, S in ((Window(5, 3), 30, 40), (rt.CAUSAL, 30, 17))
    for poisoned in ("q", "k", "v", "do")
    for softcap in (None, 3.0)
]


@pytest.mark.parametrize(
    ("mask", "T", "S", "poisoned", "softcap"), swept(GRID, lambda case: [case[2:4], case[3:], case[2:5:2]]), ids=str
)
def test_a_nan_shows_where_it_is_seen(mask: Mask, T: int, S: int, poisoned: str, softcap: float | None, backend: str) -> None:
    or_skip(backend, mask, softcap=softcap)
    assert_nan_only_where_seen(backend, mask, T, S, poisoned, softcap=softcap)


def gradients(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, do: Tensor, backend: str) -> list[Tensor]:
    """Returns o, lse and the gradients of q, k, v and the sinks under CAUSAL."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    o, lse = rt.attention_with_lse(*leaves[:3], rt.CAUSAL, sinks=leaves[3], backend=backend)
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)]


def test_a_row_that_sees_only_its_sink_does_not_use_do(backend: str) -> None:
    or_skip(backend, rt.CAUSAL, sinks=torch.zeros(1))
    q, do = torch.randn(2, 1, 30, 2, 16)
    k, v = torch.randn(2, 1, 19, 2, 16)
    sinks = torch.tensor([0.5, -1.0])
    clean = gradients(q, k, v, sinks, do, backend)
    do[:, 4] = math.nan
    found = gradients(q, k, v, sinks, do, backend)
    names = ("o", "lse", "dq", "dk", "dv", "dsinks")
    for name, x, due in zip(names, found, clean, strict=True):
        torch.testing.assert_close(x, due, msg=lambda text, name=name: f"{name}: {text}")
    assert (found[2][:, :11] == 0).all()


@pytest.mark.parametrize("T", [30, 15])
def test_a_sink_of_minus_infinity_is_no_sink(T: int, backend: str) -> None:
    or_skip(backend, rt.CAUSAL, sinks=torch.zeros(1))
    q, do = torch.randn(2, 2, T, 2, 16)
    k, v = torch.randn(2, 2, 19, 2, 16)
    sinks = torch.tensor([-math.inf, 0.3])
    o, lse, dq, dk, dv, dsinks = gradients(q, k, v, sinks, do, backend)
    assert dsinks[0] == 0
    assert dsinks[1].isfinite()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    plain_o, plain_lse = rt.attention_with_lse(*leaves, rt.CAUSAL, backend="eager")
    due = [plain_o.detach(), *torch.autograd.grad(plain_o, leaves, do)]
    for x, y in zip((o, dq, dk, dv), due, strict=True):
        torch.testing.assert_close(x[:, :, 0], y[:, :, 0])
    torch.testing.assert_close(lse[:, 0], plain_lse[:, 0])
    if T > 19:
        assert (o[:, : T - 19] == 0).all()
        assert (lse[:, 0, : T - 19] == -math.inf).all()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1), (1, 1)], ids=str)
def test_a_nan_of_a_bias_behind_the_mask_is_not_there(shape: tuple[int, int], softcap: float | None, backend: str) -> None:
    """Also in the gradient of a bias that several batches or heads share, which is a sum."""
    T, S = 24, 31
    bias = torch.randn(*shape, T, S)
    or_skip(backend, rt.CAUSAL, softcap=softcap, bias=torch.zeros(1, 1, 4, 4))
    hidden = torch.ones(T, S, dtype=torch.bool).tril(S - T).logical_not()
    inputs = [torch.randn(2, n, 2, 16) for n in (T, S, S)]
    found = []
    for fill in (0.0, math.nan):
        leaves = [x.clone().requires_grad_() for x in (*inputs, bias.masked_fill(hidden, fill))]
        o = rt.attention(*leaves[:3], rt.CAUSAL, bias=leaves[3], softcap=softcap, backend=backend)
        found.append([o.detach(), *torch.autograd.grad(o.square().sum(), leaves)])
    for clean, poisoned in zip(*found, strict=True):
        assert torch.equal(clean, poisoned)
    assert (found[1][4][..., hidden] == 0).all()
