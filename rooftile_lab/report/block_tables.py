"""Records the block tables of an engine, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from rooftile.engine.engine import Engine
from rooftile.engine.steps.runner import Result
from rooftile.engine.steps.scheduler import StepPlan

BLOCK = 16


class Table(NamedTuple):
    """An answer's block table in one step."""

    request: int  # its index in the list of requests
    answer: int  # its index among the request's answers
    blocks: tuple[int, ...]
    length: int  # tokens that have a slot


class Cell(NamedTuple):
    """A block in one step."""

    request: int  # the oldest request that owns it
    tables: int  # tables that contain it
    filled: int  # slots with a token


@dataclass(frozen=True, slots=True)
class Frame:
    """All block tables in one step, and the pool's numbers."""

    tables: tuple[Table, ...]
    waste: float  # BlockPool.waste
    saved: float  # BlockPool.saved

    def cells(self) -> dict[int, Cell]:
        """Returns every block that is in a table."""
        found: dict[int, Cell] = {}
        for table in self.tables:
            for n, block in enumerate(table.blocks):
                filled = min(max(table.length - n * BLOCK, 0), BLOCK)
                known = found.get(block, Cell(table.request, 0, 0))
                found[block] = Cell(known.request, known.tables + 1, max(known.filled, filled))
        return found


class Recorder:
    """Wraps an engine's runner and records the block tables in each step.

    Between two steps, finished answers are gone and new ones are not there yet, so the tables of a step exist only during it.
    On a GPU they are recorded while it computes.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._runner = engine.runner
        self._first: int | None = None
        self.frames: list[Frame] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, plan: StepPlan) -> Result:
        """The runner's step."""
        result = self._runner.run(plan)
        running = self._engine.scheduler.running
        if self._first is None:
            # requests are numbered in order of arrival, which is the order in which they first run
            self._first = running[0].id
        tables = tuple(
            Table(request.id - self._first, one.index, tuple(one.table.blocks), one.table.length)
            for request in running
            for one in request.answers
            if one.table is not None
        )
        pool = self._engine.pool
        self.frames.append(Frame(tables, pool.waste(), pool.saved()))
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Several answers to one prompt, and their block tables in the last step in which all of them run."""

    prompt: str
    answers: tuple[str, ...]
    tables: tuple[Table, ...]

    @property
    def shared(self) -> int:
        """The number of blocks that all of them share."""
        return len(set.intersection(*(set(table.blocks) for table in self.tables)))

    @property
    def distinct(self) -> int:
        return len({block for table in self.tables for block in table.blocks})

    @property
    def listed(self) -> int:
        """Blocks without sharing."""
        return sum(len(table.blocks) for table in self.tables)

    def json(self) -> dict[str, Any]:
        """Returns the numbers and the texts."""
        return {
            "prompt": self.prompt, "answers": self.answers, "tables": [table.blocks for table in self.tables],
            "shared": self.shared, "distinct": self.distinct, "listed": self.listed,
        }  # fmt: skip
