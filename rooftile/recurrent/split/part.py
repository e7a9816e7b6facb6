"""The part of a rank: its rows of the sequences, and which of them go on from the rank before and to the next one.

Without offsets every sequence of the batch lies on all ranks, and any lengths will do. In a pack at most one sequence crosses the
border between two ranks; every rank knows from the offsets which ranks it reaches, so no rank asks another.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.operators import transformed
from rooftile.runtime.ranks import Ranks, check_device, contiguous, ranks_of
from rooftile.runtime.tensors import check_offsets


@dataclass(frozen=True, slots=True)
class Share:
    """The sequences of one rank.

    enters, leaves: whether its first sequence has tokens on the rank before, and its last one on the next rank.
    rows: the sequences [first, last) of a pack that have tokens here; None without offsets.
    cu: their offsets among this rank's tokens.
    """

    enters: bool
    leaves: bool
    rows: tuple[int, int] | None = None
    cu: tuple[int, ...] = (0,)

    @property
    def spans(self) -> bool:
        """Whether a sequence comes from the rank before and goes to the next one."""
        return self.enters and self.leaves and (self.rows is None or self.rows[1] - self.rows[0] == 1)


@dataclass(frozen=True, slots=True)
class Part:
    """A group, the share of each rank, and the offsets of the whole pack."""

    ranks: Ranks
    shares: tuple[Share, ...]
    cu: tuple[int, ...] | None

    @property
    def own(self) -> Share:
        return self.shares[self.ranks.rank]

    def senders(self, rank: int, step: int) -> list[int]:
        """Returns the ranks whose states reach `rank`, the farthest first; step 1: those before it, -1: those behind it."""
        if not (self.shares[rank].enters if step == 1 else self.shares[rank].leaves):
            return []
        found = [rank - step]
        while self.shares[found[0]].spans:
            found.insert(0, found[0] - step)
        return found


@lru_cache(maxsize=64)
def shares_of(cu: tuple[int, ...] | None, ranks: int) -> tuple[Share, ...]:
    """Returns the share of each rank of a pack; without offsets, of whole batches."""
    if cu is None:
        return tuple(Share(rank > 0, rank < ranks - 1) for rank in range(ranks))
    found = []
    for start, stop in contiguous(cu[-1], ranks):
        if start == stop:
            found.append(Share(False, False, (0, 0)))
            continue
        # the sequences of the first and of the last token
        first, last = bisect_right(cu, start) - 1, bisect_left(cu, stop)
        own = tuple(min(max(end, start), stop) - start for end in cu[first : last + 1])
        found.append(Share(cu[first] < start, cu[last] > stop, (first, last), own))
    return tuple(found)


def part_of(name: str, group: Any, cu: Tensor | None, x: Tensor) -> Part:
    """Checks the group and the offsets of a call, and returns this rank's part.

    x: the first of the tensors of tokens, (B, T / P, ...) or, with offsets, (total / P, ...).
    """
    ranks = ranks_of(group)
    if transformed():
        raise Unsupported(f"{name} with a group under torch.func; has autograd: call backward(), or torch.autograd.grad")
    if isinstance(x, Tensor):
        check_device("x", x, ranks)
    if cu is None:
        return Part(ranks, shares_of(None, ranks.count), None)
    total = int(cu[-1]) if isinstance(cu, Tensor) and cu.ndim == 1 and len(cu) else 0
    check_offsets("cu", cu, total, "tokens of the whole pack", torch.device("cpu"), True)
    start, stop = contiguous(total, ranks.count)[ranks.rank]
    if isinstance(x, Tensor) and x.ndim and x.shape[0] != stop - start:
        raise InvalidInput(
            f"x has {x.shape[0]} tokens on rank {ranks.rank}; the layout 'contiguous' gives it {stop - start} of the pack's "
            f"{total}: pass what rooftile.parallel.shard(..., layout='contiguous') returned, and the whole pack's offsets"
        )
    offsets = tuple(cu.tolist())
    return Part(ranks, shares_of(offsets, ranks.count), offsets)


def placed(name: str, group: Any, cu: Tensor | None, x: Tensor) -> tuple[Part | None, Tensor | None]:
    """Returns this rank's part, None without a group, and the offsets: of the whole pack with a group, else on x's device."""
    if group is not None:
        return part_of(name, group, cu, x), cu
    return None, None if cu is None else check_offsets("cu", cu, x.shape[0], "tokens", x.device, False)
