"""Heads that lie gigabytes apart, as in (B, H, T, D) tensors of a million tokens: no place may be counted in 32 bits.

The numbers are in a file with holes, which takes a few pages of memory and of the disk.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rooftile import CAUSAL
from rooftile import approximate as ap

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# the place of a head, times the last one's number, is beyond 2**31
APART, HEADS = 2**30 + 16, 3


def far(x: Tensor, path: Path) -> Tensor:
    """A copy of x (1, T, heads, D) whose heads lie APART numbers apart."""
    _, T, heads, D = x.shape
    file = torch.from_file(str(path), shared=True, size=(heads - 1) * APART + T * D, dtype=x.dtype)
    return file.as_strided(x.shape, (T * D, D, APART, 1)).copy_(x)


@pytest.fixture
def near_and_far(tmp_path: Path) -> tuple[list[Tensor], list[Tensor]]:
    near = [torch.randn(1, 24, HEADS, 16).half() for _ in range(3)]
    return near, [far(x, tmp_path / str(n)) for n, x in enumerate(near)]


def both_ways(run, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.requires_grad_() for x in tensors]
    o = run(*leaves)
    return [o, *torch.autograd.grad(o.float().square().sum(), leaves)]


def test_selected_attention(near_and_far) -> None:
    chosen = torch.randint(2, (1, 24, HEADS, 2), dtype=torch.int32)
    found = [both_ways(lambda *x: ap.selected_attention(*x, chosen, block_size=16, backend="triton"), xs) for xs in near_and_far]
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


def test_the_choice_of_blocks(near_and_far) -> None:
    near, distant = ([q[:, :1], k] for q, k, _ in near_and_far)
    words = {"block_size": 16, "count": 2, "first": 0, "local": 1, "length": 8, "stride": 8, "tokens": 192}
    due = ap.choose_blocks(*near, **words, backend="eager")
    assert torch.equal(ap.choose_blocks(*distant, **words, backend="triton"), due)


def test_routing(near_and_far) -> None:
    members = ap.Members(*(torch.randint(24, (1, HEADS, 2, 8), dtype=torch.int32).sort(-1).values for _ in range(2)))
    centroids = torch.randn(HEADS, 2, 16)
    run = lambda *x: ap.routing(*x, centroids, CAUSAL, members=members, backend="triton")[0]  # noqa: E731
    for x, y in zip(*(both_ways(run, xs) for xs in near_and_far), strict=True):
        assert torch.equal(x, y)


def test_hashes(near_and_far) -> None:
    near, distant = (xs[0] for xs in near_and_far)
    assert torch.equal(ap.lsh(near, 2, 6), ap.lsh(distant, 2, 6))
