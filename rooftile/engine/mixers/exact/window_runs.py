"""Chunks behind a window, over the keys of one of several ranks.

A window sees the last w keys up to a query's own. Where w is a multiple of a block's tokens on all ranks, w / ranks of them are on
each rank, at every position. So the tokens of a chunk fall into runs of two kinds, each an ordinary problem on this rank:

    held      tokens that this rank holds: they are its last keys, under a causal mask and a window of w / ranks keys
    others    tokens between them: all see the same keys, the last w / ranks before them, which are whole blocks
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rooftile.kvcache.context_share import ContextShare
from rooftile.engine.mixers.step import StepTokens


class Runs(NamedTuple):
    """Runs of one kind, each as a sequence of its own in this rank's cache."""

    rows: Tensor  # the rows of their tokens in the step
    table: Tensor  # (runs, N) int32
    lengths: Tensor  # (runs,) int32
    cu_q: Tensor  # (runs + 1,) int32


class WindowRuns(NamedTuple):
    """The runs of a step's chunks."""

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
        host = step.known()
        positions, slots = host.positions[: step.split], host.slots[: step.split]
        lengths = share.held(positions + 1)
        place = positions % share.block - share.rank * share.size
        is_held = (place >= 0) & (place < share.size)
        columns = window // share.block
        found = []
        for kind in (is_held, ~is_held):
            rows = kind.nonzero()[:, 0]
            if not len(rows):
                found.append(None)
                continue
            # a run ends with its sequence, or before a token of the other kind; others' runs see one number of keys
            jumps = (rows.diff() != 1) | (slots[rows].diff() != 0)
            ends = torch.cat([jumps.nonzero()[:, 0] + 1, torch.tensor([len(rows)])])
            cu_q = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
            last = rows[ends - 1]
            its = lengths[last]
            if kind is is_held:
                first = torch.zeros_like(its)
                width = -(-int(its.max()) // share.size)
            else:
                first = torch.div((its - window // share.ranks).clamp(min=0), share.size, rounding_mode="floor")
                its, width = its - first * share.size, columns
            width = max(width, 1)
            packed = torch.cat([rows, its, cu_q, slots[last], first])
            sent = step.send(packed).split([len(rows), len(its), len(cu_q), len(its), len(its)])
            rows, its, cu_q, its_slots, first = sent
            spots = (first[:, None] + torch.arange(width, device=rows.device)).clamp(max=step.table.shape[1] - 1)
            table = step.table[its_slots[:, None], spots]
            found.append(Runs(rows, table, its.int(), cu_q.int()))
        return cls(*found)
