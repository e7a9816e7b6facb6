"""`PeerSums`: sums of small tensors over the GPUs of one machine, in half of NCCL's time or less."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from rooftile.engine.ranks.peers.kernels import sum_chunks, sum_words
from rooftile.engine.ranks.peers.memory import open_buffers
from rooftile.runtime.launch import Kernel

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# seconds in which the first sum of all ranks must end, kernels compiled
_FIRST_S = 60.0
_PAUSE_S = 1e-3


class _Way(NamedTuple):
    """A kernel, and the buffer that it works with."""

    kernel: Kernel
    room: int  # words
    block: int
    warps: int
    bytes_of_word: int

    def nbytes(self, ranks: int) -> int:
        """Bytes of a rank's buffer."""
        return ranks * 2 * (self.room * self.bytes_of_word + self.room // self.block * 4)


_WORDS = _Way(Kernel(sum_words), 1 << 16, 512, 4, 8)
_CHUNKS = _Way(Kernel(sum_chunks), 1 << 20, 4096, 8, 4)


class PeerSums:
    """Sums tensors over all ranks in kernels of ours, which write into the memory of the other GPUs.

    Every rank calls it with the same shapes in the same order, on one stream or on streams that wait for each other; a CUDA graph
    can capture the calls. The sum is in place; all ranks get the same bits: fp32 sums in the order of the ranks, rounded once.

    Args:
        store: where the ranks meet.
        rank, ranks: this rank's number, from 0, and how many there are; all on one machine.
        device: this rank's GPU.

    Raises:
        RuntimeError: a GPU cannot reach the memory of another.
    """

    def __init__(self, store: Any, rank: int, ranks: int, device: torch.device) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        # each rank sends its part to all others: NCCL sends less where there are many
        self._ways = [_WORDS, _CHUNKS]
        sizes = [way.nbytes(ranks) for way in self._ways]
        # `sum_words` knows an old word by its number: 0 is no call's first
        own = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        # kept: a buffer that is closed cannot be written to
        self._buffers = open_buffers(store, rank, ranks, own)
        starts = [buffer.data_ptr() for buffer in self._buffers]
        self._peers = [
            torch.tensor([start + sum(sizes[:n]) for start in starts], dtype=torch.int64, device=device)
            for n in range(len(sizes))
        ]
        self._counts = [torch.zeros(way.room // way.block, dtype=torch.int32, device=device) for way in self._ways]
        self._stop = torch.zeros(1, dtype=torch.int32, device=device)
        # made now: memory is not asked for while a kernel waits
        self._one, self._aside = torch.ones(1, dtype=torch.int32).pin_memory(), torch.cuda.Stream(device)
        self._constants: dict[tuple[int, torch.dtype], dict[str, Any]] = {}

    def takes(self, x: Tensor) -> bool:
        """Whether the sum of a tensor is computed here."""
        words, odd = divmod(x.nbytes, 4)
        return not odd and 0 < words * (self.ranks - 1) <= self._ways[-1].room and x.dtype in _DTYPES and x.is_contiguous()

    def add(self, x: Tensor) -> Tensor:
        """Sums a tensor that `takes` takes over all ranks, in place, and returns it."""
        words = x.nbytes // 4
        n = 0 if words <= self._ways[0].room else 1
        way = self._ways[n]
        constants = self._constants.get((n, x.dtype))
        if constants is None:
            constants = {
                "RANK": self.rank, "ROOM": way.room, "RANKS": self.ranks, "BLOCK": way.block, "dtype": _DTYPES[x.dtype],
                "num_warps": way.warps,
            }  # fmt: skip
            self._constants[n, x.dtype] = constants
        grid = (-(-words // way.block), 1, 1)
        way.kernel(grid, (x.view(-1).view(torch.int32), self._peers[n], self._counts[n], self._stop, words), constants)
        return x

    def works(self) -> bool:
        """Whether a first sum of all ranks is right; each rank asks at the same time."""
        due = self.ranks * (self.ranks + 1) // 2
        sizes = (way.room // self.ranks for way in self._ways)
        x = [torch.full((2 * size,), self.rank + 1.0, dtype=torch.bfloat16, device=self.device) for size in sizes]
        for part in x:
            self.add(part)
        ended = torch.cuda.Event()
        ended.record()
        until = time.monotonic() + _FIRST_S
        while not ended.query():
            if time.monotonic() > until:
                self.stop()
                return False
            time.sleep(_PAUSE_S)
        return all(bool((part == due).all()) for part in x)

    def stop(self) -> None:
        """Lets kernels go on that wait for ranks which are no more; what they have computed then has no meaning."""
        with torch.cuda.stream(self._aside):
            # a copy: it needs no place on the GPU beside kernels that wait
            self._stop.copy_(self._one, non_blocking=True)
        self._aside.synchronize()
