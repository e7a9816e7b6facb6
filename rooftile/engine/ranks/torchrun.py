"""`Torchrun`: what torchrun tells a process that it has started."""

from __future__ import annotations

import os
from typing import NamedTuple


class Torchrun(NamedTuple):
    """A process among those that torchrun has started, or whoever else sets its variables."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int

    @classmethod
    def of_environment(cls) -> Torchrun | None:
        """Returns this process's place; None if RANK is not set."""
        if "RANK" not in os.environ:
            return None
        rank, ranks = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        return cls(rank, ranks, *local)
