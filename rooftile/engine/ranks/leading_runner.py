"""`LeadingRunner`: rank 0's runner, which sends each step to the other ranks before it runs it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftile.engine.ranks.adapters import order_of
from rooftile.engine.ranks.leader import Leader
from rooftile.engine.ranks.orders import Order
from rooftile.engine.steps.runner import Computed, Runner
from rooftile.engine.steps.step import Step, encode
from rooftile.errors import InvalidInput

# all captures together may take this many times as long as a step
CAPTURES = 10


class LeadingRunner(Runner):
    """A runner whose steps all ranks run.

    Args:
        leader: the ranks.
        given, named: what `Runner` takes.
    """

    has_ranks = True

    def __init__(self, leader: Leader, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.leader = leader
        assert leader.group is not None
        self.group = leader.group
        leader.forget_graphs = self.forget_graphs
        self._sums: Tensor | None = None

    def execute(self, step: Step) -> tuple[Tensor, Tensor, list[tuple[Tensor, ...]]]:
        """Runs a step on all ranks."""
        with self.leader.guarded():
            self.group.send(Order.STEP, encode(step))
            found = super().execute(step)
            self._sums = self.group.compare(self.sampling.last[:-1])
            return found

    def check(self) -> None:
        """Raises the reason why the ranks compute no more."""
        self.leader.check()

    def load_adapter(self, slot: int, path: str | Path) -> Path:
        """Reads an adapter into a slot of all ranks, or of none."""
        assert self.adapters is not None
        # refused here before another rank hears of it
        adapter = self.adapters.read(path)
        with self.leader.guarded():
            self.group.send(Order.ADAPTER, order_of(slot, adapter.path))
            self.adapters.write(slot, adapter)
            refused = [(rank, reason) for rank, reason in enumerate(self.group.tell_all("")) if reason]
        if refused:
            rank, reason = refused[0]
            self.adapters.clear(slot)
            raise InvalidInput(f"rank {rank} of {self.leader.ranks} has refused the adapter: {reason}")
        return adapter.path

    def capture(self) -> None:
        """Captures graphs on all ranks."""
        with self.leader.guarded():
            self.group.send(Order.CAPTURE, torch.empty(0, dtype=torch.int64))
            # a capture begins with a wait for the device, which has no limit of its own
            limit = threading.Timer(CAPTURES * self.group.limit_s, self.leader.fail_late)
            limit.daemon = True
            limit.start()
            try:
                super().capture()
            finally:
                limit.cancel()

    def _collect(self, *found: Any) -> Computed:
        sums, self._sums = self._sums, None
        if sums is not None and sums.is_cuda:
            sums = sums.to("cpu", non_blocking=True)
        computed = super()._collect(*found)
        return computed._replace(arrived=_Arrival(self.leader, computed.arrived, sums))


class _Arrival:
    """The end of a step on the device, as `Computed` waits for it."""

    def __init__(self, leader: Leader, event: Any, sums: Tensor | None) -> None:
        self._leader, self._event, self._sums = leader, event, sums

    def synchronize(self) -> None:
        """Waits for it."""
        self._leader.wait_for(self._event, self._sums)
