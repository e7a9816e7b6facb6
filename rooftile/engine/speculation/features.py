"""`Features`: the hidden states of a model that a head drafts from, in the blocks of the tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from rooftile.kvcache import Pages
from rooftile.models.drafts.head import DraftHead

NAME = "features"


class Features:
    """A row of numbers of each token, which follows forks and prefixes with its block.

    Args:
        head: says what it reads of the model.
        pages: the model's pages, beside whose keys they lie.
    """

    def __init__(self, head: DraftHead, pages: Pages) -> None:
        self.taps, self.fuse, self._dtype = head.taps, head.fuse, head.embedding.dtype
        blocks, _, _, size, _, _ = pages.storage.shape
        # the last block is for rows that pad a step
        memory = torch.zeros(blocks + 1, size, head.config.hidden, dtype=self._dtype, device=head.embedding.device)
        pages.planes[NAME] = memory
        self._rows = memory.view(-1, head.config.hidden)
        self._pad = blocks * size

    def write(self, streams: Mapping[int, Tensor | None], hidden: Tensor, cells: Tensor) -> None:
        """Joins and keeps the streams of layers, or else hidden states, (total, hidden) each, in the cells of their tokens.

        A cell of -1 is padding.
        """
        found = [stream.to(self._dtype) for stream in (streams[n] for n in self.taps) if stream is not None] or [hidden]
        x = found[0] if self.fuse is None else linear(torch.cat(found, dim=1), self.fuse)
        self._rows.index_copy_(0, torch.where(cells >= 0, cells, self._pad), x)

    def read(self, cells: Tensor) -> Tensor:
        """Returns the rows (total, hidden) of cells."""
        return self._rows.index_select(0, torch.where(cells >= 0, cells, self._pad))
