"""Attention to chosen blocks on a GPU: the kernels beside the definition, in each dtype, with the paper's sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rooftile import approximate as ap
from rooftile.approximate.selected import attend
from tests.approximate.test_selected import definition
from tests.approximate.tolerance import assert_within

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("H", "Hk", "D"), [(16, 1, 128), (32, 8, 64), (10, 2, 64)])
def test_forward_and_gradients(dtype: torch.dtype, H: int, Hk: int, D: int, device: torch.device) -> None:
    B, T, block = 2, 700, 64
    q = torch.randn(B, T, H, D, device=device, dtype=dtype)
    k, v = (torch.randn(B, T, Hk, D, device=device, dtype=dtype) for _ in range(2))
    chosen = ap.choose_blocks(q, ap.compress(k), count=5, block=block)
    wide, plain, leaves = ([x.to(kind).requires_grad_() for x in (q, k, v)] for kind in (torch.float64, dtype, dtype))
    do = torch.randn(B, T, H, D, device=device, dtype=dtype)
    answers = []
    for run, inputs in ((definition, wide), (definition, plain), (_kernels, leaves), (_kernels, leaves)):
        o, _ = run(*inputs, chosen, block)
        grads = torch.autograd.grad((o * do.to(o.dtype)).sum(), inputs)
        answers.append(dict(zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True)))
    exact, usual, found, again = answers
    assert all(torch.equal(found[name], again[name]) for name in found)
    # a key's gradient is the sum over all queries and heads that chose its block
    assert_within(found, exact, usual, dtype, terms=T * H // Hk)


def _kernels(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return attend(q, k, v, chosen, block=block, scale=0.3, backend="triton")


def test_the_choice(device: torch.device) -> None:
    q, k = torch.randn(2, 900, 16, 64, device=device), torch.randn(2, 900, 2, 64, device=device)
    compressed = ap.compress(k)
    due = ap.choose_blocks(q, compressed, backend="eager", count=6)
    assert torch.equal(ap.choose_blocks(q, compressed, backend="triton", count=6), due)
