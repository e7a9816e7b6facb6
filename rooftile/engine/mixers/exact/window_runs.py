"""Chunks behind a window, over the keys of one of several ranks.

A query sees the last w keys up to its own. Where w is a multiple of a block's tokens on all ranks together, each rank holds
w / ranks of them, whatever the query's position. So the tokens of a chunk fall into runs of two kinds, each an ordinary problem:

    held      tokens that this rank holds: they are its last keys, under a causal mask and a window of w / ranks keys
    others    tokens between them: all see the same keys, the last w / ranks before them, which are whole blocks
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.engine.mixers.step import StepTokens
from rooftile.kvcache.context_share import ContextShare


class Runs(NamedTuple):
    """Runs of one kind, each as a sequence of its own in this rank's cache."""

    rows: Tensor  # the rows of their tokens in the step
    table: Tensor  # (runs, N) int32
    lengths: Tensor  # (runs,) int32
    cu_q: Tensor  # (runs + 1,) int32


class WindowRuns(NamedTuple):
    """The runs of a step's chunks; None where there are none of a kind."""

    held: Runs | None
    others: Runs | None

    @classmethod
    def of(cls, step: StepTokens, share: ContextShare, window: int) -> WindowRuns:
        """Cuts a step's chunks into runs.

        Args:
            step: the step.
            share: which tokens are this rank's.
            window: how many keys a query sees, a multiple of `share.block`.
        """
        positions = step.known().positions[: step.split]
        is_held = share.cells(torch.zeros_like(positions), positions) >= 0
        visible = share.held(positions + 1)
        # these see whole blocks: the ones before a window's first are left out of their table
        first = torch.div((visible - window // share.ranks).clamp(min=0), share.size, rounding_mode="floor")
        held = _runs(step, is_held, visible, torch.zeros_like(first), share.size)
        return cls(held, _runs(step, ~is_held, visible - first * share.size, first, share.size))


def _runs(step: StepTokens, kind: Tensor, visible: Tensor, first: Tensor, size: int) -> Runs | None:
    """Returns the runs of one kind of tokens.

    Args:
        step: the step.
        kind: (n,) whether a token of the chunks is of this kind.
        visible: (n,) how many keys there are up to a token's last one, from block `first` of its sequence on.
        first: (n,) that block.
        size: tokens of a block here.
    """
    rows, slots = kind.nonzero()[:, 0], step.known().slots
    if not len(rows):
        return None
    # a run ends before a token of the other kind, and with its sequence
    jumps = (rows.diff() != 1) | (slots[rows].diff() != 0)
    ends = torch.cat([jumps.nonzero()[:, 0] + 1, torch.tensor([len(rows)])])
    last = rows[ends - 1]
    columns = max(-(-int(visible[last].max()) // size), 1)
    packed = torch.cat([rows, torch.zeros(1, dtype=torch.int64), ends, visible[last], first[last], slots[last]])
    n = len(ends)
    rows, cu_q, lengths, begins, slots = step.send(packed).split([len(rows), n + 1, n, n, n])
    # behind a sequence's last block nothing is read
    places = (begins[:, None] + torch.arange(columns, device=rows.device)).clamp(max=step.table.shape[1] - 1)
    return Runs(rows, step.table[slots[:, None], places], lengths.int(), cu_q.int())
