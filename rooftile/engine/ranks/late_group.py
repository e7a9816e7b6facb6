"""`LateGroup`: a group of ranks that is made in a thread, while this rank reads its weights and compiles its kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from rooftile.engine.ranks.group import RankGroup
from rooftile.engine.ranks.lines import Progress

# how often it is looked whether all ranks have met
_PULSE_S = 0.01


class LateGroup:
    """A group of ranks that meet meanwhile: a rank that has just been started needs seconds to import PyTorch.

    Args:
        rank, ranks: this process's number, from 0, and how many there are.
        make: makes the group; it returns when all ranks have met, and is waited for in vain when one of them has ended.
        check: raises the reason if so; called again and again while somebody waits.
    """

    def __init__(self, rank: int, ranks: int, make: Callable[[], RankGroup], check: Callable[[], None] = lambda: None) -> None:
        self.rank, self.ranks = rank, ranks
        self._make, self._check = make, check
        self._made: RankGroup | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="rooftile meeting", daemon=True)
        self._thread.start()

    def ready(self) -> RankGroup:
        """Waits for the group, and returns it."""
        while self._thread.is_alive():
            self._check()
            self._thread.join(_PULSE_S)
        if self._failure is not None:
            raise self._failure
        assert self._made is not None
        return self._made

    def add(self, x: Tensor) -> Tensor:
        """Sums a tensor over all ranks, as `RankGroup.add` does."""
        return self.ready().add(x) if self._made is None else self._made.add(x)

    def gather(self, x: Tensor) -> Tensor:
        """Joins the columns of all ranks, as `RankGroup.gather` does."""
        return self.ready().gather(x) if self._made is None else self._made.gather(x)

    def progress(self) -> Progress:
        """Returns how far this rank's host is, as `RankGroup.progress` does."""
        return Progress(0, 0) if self._made is None else self._made.progress()

    def _run(self) -> None:
        try:
            self._made = self._make()
        except Exception as error:
            self._failure = error
