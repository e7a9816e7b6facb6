"""`CacheLayout`: what a block, a row and a running sequence of an engine hold, for all layers together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import torch

from rooftile.errors import InvalidInput
from rooftile.kvcache import BlockPool, Pages, ReservedPool, WindowPool
from rooftile.kvcache.caches import Caches
from rooftile.kvcache.specs import CacheSpec, PagedKeys, Plane, State, WindowedKeys
from rooftile.kvcache.states import Snapshots, StateRows, States, sum_of

Spec = TypeVar("Spec", bound=CacheSpec)


@dataclass(frozen=True, slots=True)
class PeakLoad:
    """The most that an engine runs at once.

    Args:
        answers: the most answers that run at once.
        tokens: the most tokens that a step reads.
        paged: whether blocks are shared and give their rows back; else each sequence reserves its own.
        prefixes: whether prefixes are found again.
        kept: the most states that are kept for prefixes.
    """

    answers: int
    tokens: int
    paged: bool = True
    prefixes: bool = True
    kept: int = 0


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The caches of a model.

    Args:
        size: tokens per block, on each rank.
        specs: what its kinds of layers keep.
        ranks: how many ranks hold a part of the tokens of each block (context parallelism).
        drafted: the bytes that a draft model keeps in each block.

    Raises:
        InvalidInput: layers keep keys of different sizes, or windows of different lengths.
    """

    size: int
    specs: tuple[CacheSpec, ...]
    ranks: int = 1
    drafted: int = 0

    def __post_init__(self) -> None:
        pages = {(spec.heads, spec.dim) for spec in self._of(PagedKeys)}
        rows = {(spec.heads, spec.dim, spec.window) for spec in self._of(WindowedKeys)}
        for found, what in ((pages, "keys of the sizes"), (rows, "windows of keys of the sizes")):
            if len(found) > 1:
                raise InvalidInput(f"the model's layers keep {what} {sorted(found)}; all must have the same")

    def _of(self, kind: type[Spec]) -> list[Spec]:
        return [spec for spec in self.specs if isinstance(spec, kind)]

    @property
    def tokens(self) -> int:
        """Tokens per block, of all ranks together."""
        return self.size * self.ranks

    @property
    def places(self) -> dict[int, int]:
        """The place of each layer that has pages, among all that have."""
        return {layer: place for place, layer in enumerate(_layers(self._of(PagedKeys)))}

    @property
    def window(self) -> int | None:
        """The keys that a window sees; None if nothing is in rows."""
        return next((spec.window for spec in self._of(WindowedKeys)), None)

    @property
    def has_states(self) -> bool:
        """Whether running sequences have states."""
        return bool(self._of(State))

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of one block, for a cache in `dtype`, and of the draft model in it."""
        return sum(spec.block_bytes(self.size, dtype) for spec in self.specs) + self.drafted

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of one row: the keys and values of a block that only a window reads."""
        return sum(spec.row_bytes(self.size, dtype) for spec in self.specs)

    def sequence_bytes(self) -> int:
        """Returns the bytes of one row of states: what a running answer takes whatever its length."""
        return sum(spec.sequence_bytes() for spec in self.specs)

    def state_bytes(self, load: PeakLoad) -> int:
        """Returns the bytes of all states."""
        rows = self.state_rows(load)
        return 0 if rows is None else rows.total * self.sequence_bytes()

    def state_rows(self, load: PeakLoad) -> StateRows | None:
        """Returns the rows of states; None if no layer has a state."""
        return StateRows(load.answers, load.kept) if self.has_states else None

    def states_in_words(self) -> str:
        """Says how many bytes the states of one sequence take, with the arithmetic."""
        return sum_of(self._of(State))

    def kept_in(self, room: int, most: int, load: PeakLoad) -> int:
        """Returns how many states are kept for prefixes: at least one, and no more than leave room for an answer.

        Args:
            room: the bytes of all states.
            most: the bytes that kept states may have.
            load: the most that runs at once.
        """
        if not (self.has_states and load.prefixes and load.paged):
            return 0
        one = self.state_bytes(replace(load, answers=1, kept=0))
        return max(1, min(most, room - one) // self.sequence_bytes())

    def answers_in(self, room: int, load: PeakLoad) -> int:
        """Returns how many of a load's answers may run, so that all states fit into `room` bytes; 0 if not even one may."""
        fits = (n for n in range(load.answers, 0, -1) if self.state_bytes(replace(load, answers=n)) <= room)
        return next(fits, 0)

    def page_bytes(self, blocks: int, dtype: torch.dtype, load: PeakLoad) -> int:
        """Returns the bytes of this many blocks, with their rows."""
        return blocks * self.block_bytes(dtype) + self.rows(blocks, load) * self.row_bytes(dtype)

    def rows(self, blocks: int, load: PeakLoad) -> int:
        """Returns how many rows `blocks` blocks have: enough for all windows at once, and at most one per block."""
        if self.window is None or not load.paged:
            return blocks
        # a prompt that is kept for further answers holds the rows of one more
        return min(blocks, WindowPool.rows_for(self.window, self.size, answers=load.answers + 1, tokens=load.tokens))

    def blocks_in(self, room: int, dtype: torch.dtype, load: PeakLoad) -> int | None:
        """Returns how many blocks, with rows and states, fit into `room` bytes; None if blocks take no memory."""
        each, row = self.block_bytes(dtype), self.row_bytes(dtype)
        room -= self.state_bytes(load)
        if not each + row:
            return None if room >= 0 else 0
        blocks = max(room, 0) // (each + row)
        rows = self.rows(blocks, load)
        return blocks if rows == blocks else (room - rows * row) // each

    def pool(self, blocks: int, load: PeakLoad, longest: int) -> BlockPool:
        """Returns the books of this many blocks.

        Args:
            blocks: the number of blocks.
            load: the most that runs at once.
            longest: the longest sequence in tokens.
        """
        if not load.paged:
            return ReservedPool(blocks, self.tokens, reserve=longest)
        rows, prefixes = self.rows(blocks, load), load.prefixes
        pool: BlockPool
        if rows < blocks and self.window is not None:
            pool = WindowPool(blocks, self.tokens, rows=rows, window=self.window, prefixes=prefixes)
        else:
            pool = BlockPool(blocks, self.tokens, prefixes=prefixes)
        if self.has_states and prefixes:
            pool.snapshots = Snapshots(load.kept)
        return pool

    def allocate(self, blocks: int, load: PeakLoad, dtype: torch.dtype, device: torch.device) -> Caches:
        """Returns the memory of this many blocks, with their rows, and of all states."""
        places = self.places
        # without a layer that has pages a block is a number in the books, and no memory
        sizes = next(((spec.heads, spec.dim) for spec in self._of(PagedKeys)), (1, 1))
        pages = Pages(blocks, len(places), *sizes, block_size=self.size, dtype=dtype, device=device)
        for plane in self._of(Plane):
            pages.add_plane(plane.name, *plane.shape)
        for windowed in self._of(WindowedKeys):
            pairs = windowed.pairs * len(windowed.layers)
            pages.window_pages = Pages(
                self.rows(blocks, load), pairs, windowed.heads, windowed.dim, block_size=self.size, dtype=dtype, device=device
            )  # fmt: skip
        rows = self.state_rows(load)
        return Caches(pages, places, None if rows is None else States(self._of(State), rows, device))


def _layers(specs: Iterable[CacheSpec]) -> list[int]:
    return sorted(chain.from_iterable(spec.layers for spec in specs))
