"""A boolean bias: True where a key is seen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rooftile as rt
from tests.grids import swept

B, T, S, H, Hk, D = 2, 21, 34, 4, 2, 16
SHAPES = [(B, H, T, S), (B, 1, 1, S), (1, H, T, 1), (T, S), (S,), (1, 1, T, S)]


def inputs() -> list[Tensor]:
    return [torch.randn(B, n, h, D, requires_grad=True) for n, h in ((T, H), (S, Hk), (S, Hk))]


def run(leaves: list[Tensor], seen: Tensor, backend: str | None, **options: Any) -> list[Tensor]:
    o, lse = rt.attention_with_lse(*leaves, bias=seen, backend=backend, **options)
    do = torch.linspace(-1, 1, o.numel()).view(o.shape)
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)]


OPTIONS: list[dict[str, Any]] = [{}, {"mask": rt.CAUSAL, "softcap": 3.0}]
GRID = [(shape, n) for shape in SHAPES for n in range(len(OPTIONS))]


@pytest.mark.parametrize(("shape", "n"), swept(GRID, lambda case: [case[:1], case[1:]]), ids=str)
def test_equals_masking_by_hand(shape: tuple[int, ...], n: int, backend: str) -> None:
    leaves, seen, options = inputs(), torch.rand(shape) < 0.6, OPTIONS[n]
    if len(shape) > 1 and shape[-2] == T:
        # a row that sees no key
        seen[..., 0, :] = False
    try:
        rt.attention(*leaves, bias=seen, backend=backend)
    except rt.Unsupported:
        assert backend not in ("eager", "tiled"), "these have a bias"
        return
    found = run(leaves, seen, backend, **options)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    hidden = torch.zeros(B, H, T, S, dtype=torch.float64).masked_fill(~seen, -math.inf)
    due = run(wide, hidden, "eager", **options)
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=1e-4, atol=1e-5)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **kwargs or {})
        if isinstance(found, Tensor) and found.untyped_storage().nbytes() > self.numel * 4:
            self.numel = found.untyped_storage().nbytes() // 4
        return found


def test_what_is_broadcast_is_not_expanded() -> None:
    from rooftile.exact.spec import Options
    from rooftile.exact.validate import bias_in_numbers

    seen = (torch.rand(B, 1, 1, 300) < 0.5).expand(B, 64, 128, 300)
    with Largest() as largest:
        bias = bias_in_numbers(Options(bias=seen), torch.bfloat16).bias
    assert bias is not None
    assert (bias.shape, bias.dtype) == ((B, 1, 1, 300), torch.bfloat16)
    assert torch.equal(bias == 0, seen[:, :1, :1])
    assert 0 < largest.numel <= B * 300


def test_packed_and_explained() -> None:
    q, k, v = (torch.randn(10, 2, D) for _ in range(3))
    cu, seen = torch.tensor([0, 3, 10]), torch.rand(1, 10, 7) < 0.6
    due = torch.zeros(1, 10, 7).masked_fill(~seen, -math.inf)
    assert torch.equal(rt.attention_packed(q, k, v, cu, cu, bias=seen), rt.attention_packed(q, k, v, cu, cu, bias=due))
    assert " bias " in rt.explain(*inputs(), bias=torch.ones(S, dtype=torch.bool))
