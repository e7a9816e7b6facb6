"""`Features`: the hidden states of a model that a head drafts from, in the blocks of the tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from rooftile.kvcache import Pages

NAME = "features"


class Features:
    """A row of numbers of each token, which follows forks and prefixes with its block.

    Args:
        fuse: joins the streams of some layers, (hidden, layers x hidden).
        layers: the layers, in the order in which they are joined; one may come twice.
        pages: the model's pages, beside whose keys they lie.
    """

    def __init__(self, fuse: Tensor, layers: tuple[int, ...], pages: Pages) -> None:
        self.fuse, self.layers = fuse, layers
        blocks, _, _, size, _, _ = pages.storage.shape
        # the last block is for rows that pad a step
        memory = torch.zeros(blocks + 1, size, len(fuse), dtype=fuse.dtype, device=fuse.device)
        pages.planes[NAME] = memory
        self._rows = memory.view(-1, len(fuse))
        self._pad = blocks * size

    def write(self, streams: Mapping[int, Tensor | None], cells: Tensor) -> None:
        """Joins and keeps what reached the layers, (total, hidden) each, in the cells of their tokens; -1 for padding."""
        found = [streams[n] for n in self.layers]
        x = linear(torch.cat([each.to(self.fuse.dtype) for each in found if each is not None], dim=1), self.fuse)
        self._rows.index_copy_(0, torch.where(cells >= 0, cells, self._pad), x)

    def read(self, cells: Tensor) -> Tensor:
        """Returns the rows (total, hidden) of cells."""
        return self._rows.index_select(0, torch.where(cells >= 0, cells, self._pad))
