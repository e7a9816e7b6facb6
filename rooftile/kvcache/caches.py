"""`Caches`: the memory of everything that the layers of a model keep, and the copies that a step asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rooftile.kvcache.blocks import Copy
from rooftile.kvcache.context_share import ContextShare
from rooftile.kvcache.pages import Pages
from rooftile.kvcache.states import States


class Caches:
    """The caches of one model.

    Args:
        pages: blocks, with their planes and their rows.
        places: the place in `pages` of each layer that keeps keys and values there.
        states: the states of sequences; None if no layer has one.
    """

    def __init__(self, pages: Pages, places: Mapping[int, int], states: States | None = None) -> None:
        self.pages, self.places, self.states = pages, places, states
        self.share: ContextShare | None = None
        """The tokens of each sequence that this rank holds, where several ranks share its tokens; None if it holds all."""
        self.rows: Tensor | None = None
        """(blocks,) int32: the row of each block; None if each block is its own row."""
        self.draft: Pages | None = None
        """The keys and values of a draft model, in the same blocks; None without one."""
        blocks, window_pages = pages.storage.shape[0], pages.window_pages
        if window_pages is not None and window_pages.storage.shape[0] < blocks:
            self.rows = torch.zeros(blocks, dtype=torch.int32, device=pages.storage.device)

    @property
    def nbytes(self) -> int:
        """The bytes of blocks, rows and states, and of a draft model's blocks."""
        beside = [each.nbytes for each in (self.states, self.draft) if each is not None]
        return self.pages.nbytes + sum(beside)

    def __str__(self) -> str:
        parts = [str(self.pages)] if self.places or self.pages.planes else []
        parts += [] if self.states is None else [str(self.states)]
        parts += [] if self.draft is None else [f"a draft model's in {self.draft}"]
        return ", and ".join(parts)

    def prepare(
        self, copies: Sequence[Copy], rows: Mapping[int, int], row_copies: Sequence[Copy], states: Mapping[int, int]
    ) -> None:  # fmt: skip
        """Copies what a step writes that is shared no longer, and notes the rows that blocks have got.

        Args:
            copies: blocks.
            rows: rows by block.
            row_copies: the copies of rows that go with the copies of blocks.
            states: rows of states, the source by its target.
        """
        self.pages.copy(copies)
        if rows and self.rows is not None:
            pairs = torch.tensor([*rows.items()])
            if self.rows.is_cuda:
                pairs = pairs.pin_memory().to(self.rows.device, non_blocking=True)
            self.rows.index_put_((pairs[:, 0],), pairs[:, 1].int())
        if self.pages.window_pages is not None:
            self.pages.window_pages.copy(copies if self.rows is None else row_copies)
        if self.states is not None:
            self.states.copy(states)

    def finish(self, states: Mapping[int, int]) -> None:
        """Copies states after a step has written them: for forks, and to keep them."""
        if self.states is not None:
            self.states.copy(states)
