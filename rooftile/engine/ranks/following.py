"""`follow`: what ranks other than 0 do: they run rank 0's orders."""

from __future__ import annotations

from rooftile.engine.ranks.adapters import load_part
from rooftile.engine.ranks.group import RankGroup
from rooftile.engine.ranks.orders import Order
from rooftile.engine.start.blueprint import current_device
from rooftile.engine.steps.runner import Runner
from rooftile.engine.steps.step import decode


def follow(runner: Runner, group: RankGroup) -> None:
    """Runs rank 0's orders until it says that there are no more."""
    with current_device(group.device):
        while True:
            order, numbers = group.receive()
            if order is Order.END:
                return
            if order is Order.CAPTURE:
                runner.capture()
                continue
            if order is Order.ADAPTER:
                load_part(runner, group, numbers)
                continue
            runner.execute(decode(numbers))
            group.compare(runner.sampling.last[:-1])
