"""`CacheSpec`: frozen descriptions of what a kind of layer keeps of the tokens that it has read.

               lies in          begins a prefix               a fork                     a preemption
PagedKeys      blocks           the blocks                    shares blocks, and copies  gives them up; sealed ones may be
                                                              one before it is written   found again
Plane          beside blocks    goes with the block           with the block             with the block
WindowedKeys   rows of blocks   blocks in the window of the   shares rows with blocks    gives them up with the blocks
                                next token must have rows
State          one row of each  a state that was kept after   copies the state, after    forgets it: tokens are read again
               running answer   that very token (Snapshots)   the step that it follows   from the last state that was kept
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A description of what some layers keep.

    Args:
        layers: the numbers of the layers, rising.
    """

    layers: tuple[int, ...]

    def block_bytes(self, size: int, dtype: torch.dtype) -> int:
        """Returns the bytes in each block of `size` tokens, for a cache in `dtype`."""
        return 0

    def row_bytes(self, size: int, dtype: torch.dtype) -> int:
        """Returns the bytes in each row that a block has for as long as a window reads it."""
        return 0

    def sequence_bytes(self) -> int:
        """Returns the bytes of each running sequence, whatever its length."""
        return 0


@dataclass(frozen=True, slots=True)
class PagedKeys(CacheSpec):
    """A key and a value of each token, for all later tokens.

    Args:
        heads, dim: key heads, and their size.
    """

    heads: int
    dim: int

    def block_bytes(self, size: int, dtype: torch.dtype) -> int:
        line = self.dim * dtype.itemsize
        if dtype.itemsize == 1:
            # one fp32 scale per token and head
            line += 4
        return len(self.layers) * 2 * size * self.heads * line


@dataclass(frozen=True, slots=True)
class WindowedKeys(CacheSpec):
    """Keys and values that only the queries near behind them read.

    Args:
        heads, dim: key heads, and their size.
        window: the keys that a query sees, its own among them.
        pairs: how many keys and values a token has in each layer.
    """

    heads: int
    dim: int
    window: int
    pairs: int = 1

    def row_bytes(self, size: int, dtype: torch.dtype) -> int:
        return self.pairs * len(self.layers) * 2 * size * self.heads * self.dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Plane(CacheSpec):
    """Numbers about a block's tokens that lie beside their keys, in the dtype of the keys.

    Args:
        name: the name in `Pages.planes`.
        shape: the numbers of each block.
    """

    name: str
    shape: tuple[int, ...]

    def block_bytes(self, size: int, dtype: torch.dtype) -> int:
        return math.prod(self.shape) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class State(CacheSpec):
    """A sum over all tokens so far, of a fixed size.

    Args:
        name: the name in `States.memory`.
        shape: the numbers of one layer.
        dtype: their dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def sequence_bytes(self) -> int:
        return len(self.layers) * math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        """Says how many bytes a sequence takes, as a product."""
        return f"{len(self.layers)} layers x {' x '.join(f'{n:,}' for n in self.shape)} x {self.dtype.itemsize} bytes"


def bytes_in_words(n: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:,.3g} GB"
