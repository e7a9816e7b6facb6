"""Kernels that sum over GPUs, in Triton's interpreter on one CPU, with the ranks one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from rooftile.engine.ranks.peers.kernels import sum_chunks, sum_words

ROOM, BLOCK = 512, 64
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
KERNELS = {"words": sum_words, "chunks": sum_chunks}


class Ranks:
    """The buffers of some ranks, and one call of each rank after the other."""

    def __init__(self, kernel: Any, ranks: int, dtype: torch.dtype) -> None:
        self.kernel, self.ranks, self.dtype = kernel, ranks, dtype
        self.buffers = [torch.zeros(ranks * 2 * (ROOM + ROOM // BLOCK), dtype=torch.int64) for _ in range(ranks)]
        self.peers = torch.tensor([buffer.data_ptr() for buffer in self.buffers])
        self.counts = [torch.zeros(ROOM // BLOCK, dtype=torch.int32) for _ in range(ranks)]

    def call(self, rank: int, x: Tensor, *, waits: bool) -> Tensor:
        """Runs a rank's kernel; one that does not wait sums what is there."""
        x, stop = x.clone(), torch.tensor([0 if waits else 1], dtype=torch.int32)
        words = x.nbytes // 4
        self.kernel[(-(-words // BLOCK),)](
            x.view(torch.int32), self.peers, self.counts[rank], stop, words, RANK=rank, ROOM=ROOM, RANKS=self.ranks, BLOCK=BLOCK,
            dtype=DTYPES[self.dtype],
        )  # fmt: skip
        return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_the_last_rank_gets_the_sum_in_the_order_of_ranks(name: str, dtype: torch.dtype) -> None:
    """Calls of several sizes follow one another; each finds its own numbers, and not the last call's."""
    torch.manual_seed(0)
    ranks = 3
    group = Ranks(KERNELS[name], ranks, dtype)
    for last, size in ((2, 2), (0, 130), (1, 1000), (2, 66), (0, 66), (1, 4), (1, 1000)):
        size = size if dtype != torch.float32 else size // 2
        parts = [torch.randn(size).to(dtype) for _ in range(ranks)]
        for rank in (rank for rank in range(ranks) if rank != last):
            group.call(rank, parts[rank], waits=False)
        due = torch.zeros(size)
        for part in parts:
            due = due + part.float()
        assert torch.equal(group.call(last, parts[last], waits=True), due.to(dtype))
