"""Gradients that another backend has spoiled are computed once more, if it says so."""

from __future__ import annotations

import pytest
import torch

from rooftile import reference
from rooftile.backends import triton
from rooftile.backends.triton import row_stats
from rooftile.backends.triton.call import call_of, strides_of
from rooftile.masks import CAUSAL
from rooftile.spec import Options, Spec


@pytest.mark.parametrize("shape", [(2, 70, 4, 2), (1, 33, 2, 2)])
def test_only_what_is_lost_is_computed_again(shape: tuple[int, int, int, int]) -> None:
    B, T, H, Hk = shape
    q, do = torch.randn(B, T, H, 16), torch.randn(B, T, H, 16)
    k, v = torch.randn(B, T, Hk, 16), torch.randn(B, T, Hk, 16)
    spec = Spec(dtype=torch.float32, dim=16, dim_v=16, group=H // Hk, mask=CAUSAL, scale=0.25, needs_grad=True)
    o, lse = triton.forward(q, k, v, Options(), spec)
    call = call_of(q, k, v, Options(), spec)
    _, words = row_stats.plan(call, strides_of(o), strides_of(do), has_dlse=False)(o, do, lse, None)
    due = reference.gradients(do.double(), torch.zeros(B, H, T), q.double(), k.double(), v.double(), CAUSAL, scale=0.25)
    repair = triton.repair(q, k, v, do, Options(), spec)
    for _ in range(2):
        grads = [torch.full_like(x, 7.0) for x in (q, k, v)]
        repair(torch.tensor([0], dtype=torch.int32), q, k, v, do, words, *grads, Options())
        assert all((x == 7.0).all() for x in grads)
        repair(torch.tensor([1], dtype=torch.int32), q, k, v, do, words, *grads, Options())
        for x, y in zip(grads, due[:3], strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)
