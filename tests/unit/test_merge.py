"""Merging parts whose lse share an offset."""

from __future__ import annotations

import math

import pytest
import torch

import rooftile as rt


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6, 1e8, -1e6, torch.finfo(torch.float32).min])
def test_parts_that_share_an_offset(offset: float) -> None:
    """o, lse and gradients are what the given lse say in fp64, and the parts' weights add up to one."""
    draw = [(torch.randn(2, 5, 3, 4), torch.randn(2, 3, 5)) for _ in range(3)]
    for _, lse in draw:
        lse[..., 1::2] += offset
    draw[1][1][..., 0] = -math.inf
    do, dlse = torch.randn(2, 5, 3, 4), torch.randn(2, 3, 5)
    found = []
    for dtype in (torch.float64, torch.float32):
        parts = [tuple(x.to(dtype).requires_grad_() for x in part) for part in draw]
        o, lse = rt.merge(parts)
        leaves = [x for part in parts for x in part]
        found.append([o, lse, *torch.autograd.grad([o, lse], leaves, [do.to(dtype), dlse.to(dtype)])])
    for due, x in zip(*found, strict=True):
        torch.testing.assert_close(x.double(), due, rtol=1e-5, atol=1e-5)
    shares = found[1][2::2]
    torch.testing.assert_close(sum(shares), do)


@pytest.mark.parametrize("name", ["tiled", "eager"])
def test_a_row_that_sees_padding_only_is_the_mean(name: str) -> None:
    """A mask of padding may add the smallest number of the dtype to every score of the row."""
    q, k, v, do = (torch.randn(2, 9, 2, 8) for _ in range(4))
    bias = torch.zeros(2, 1, 9, 9)
    bias[:, :, :4] = torch.finfo(bias.dtype).min
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = rt.attention(*leaves, bias=bias, backend=name)
    torch.testing.assert_close(o[:, :4], v.mean(1, keepdim=True).expand(-1, 4, -1, -1))
    dq, _, dv = torch.autograd.grad(o, leaves, do)
    torch.testing.assert_close(dv.sum(1), do.sum(1), rtol=1e-5, atol=1e-5)
    s = torch.einsum("bthd,bshd->bhts", q, k) * 8**-0.5 + bias
    (due,) = torch.autograd.grad(torch.einsum("bhts,bshd->bthd", s.softmax(-1), v), q, do)
    torch.testing.assert_close(dq, due, rtol=1e-4, atol=1e-5)
