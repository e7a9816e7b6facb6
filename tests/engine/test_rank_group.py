"""Orders, sums and checksums between the ranks of an engine, with each rank in a thread."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rooftile.engine.ranks import orders as module
from rooftile.engine.ranks.group import COMPARED, LOOPBACK, RankGroup
from rooftile.engine.ranks.orders import Order, SocketOrders

RANKS = 3


def on_ranks(function: Callable[[RankGroup], Any], *, ordered: bool = False, sockets: bool = False) -> list[Any]:
    """Calls a function with the group of each rank, in a thread each."""
    store = dist.HashStore()
    pairs = [socket.socketpair() for _ in range(1, RANKS)] if sockets else []

    def run(rank: int) -> Any:
        ours = [pair[0] for pair in pairs] if rank == 0 else [pair[1] for pair in pairs][rank - 1 : rank]
        orders = SocketOrders(ours) if sockets else None
        device = torch.device("cpu")
        return function(RankGroup(store, rank, RANKS, device, address=LOOPBACK, ordered=ordered, limit_s=20.0, orders=orders))

    with ThreadPoolExecutor(RANKS) as threads:
        found = list(threads.map(run, range(RANKS)))
    for pair in pairs:
        pair[0].close()
        pair[1].close()
    return found


def test_sums_columns_and_the_least() -> None:
    def exchange(group: RankGroup) -> Any:
        x = torch.full((2, 5), 10.0**group.rank)
        total = group.add(x)
        assert total is x
        joined = group.gather(torch.arange(4).view(2, 2) + 10 * group.rank)
        # a step of which no answer gets a token
        assert group.gather(torch.empty(0, 5)).shape == (0, 15)
        return total.unique().tolist(), joined.tolist(), group.least([5 - group.rank, 7 + group.rank])

    due = ([111.0], [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23]], [3, 7])
    assert on_ranks(exchange) == [due] * RANKS


def test_ordered_sums_add_in_the_order_of_the_ranks() -> None:
    """(1 + 2^-24) + 2^-24 rounds to 1 in fp32, and 1 + (2^-24 + 2^-24) does not; with any number of numbers beside it."""

    def add(group: RankGroup) -> list[float]:
        return [group.add(torch.full((size,), 1.0 if group.rank == 0 else 2.0**-24)).unique().item() for size in (1, 7, 999)]

    assert on_ranks(add, ordered=True) == [[1.0] * 3] * RANKS


@pytest.mark.parametrize("sockets", [False, True], ids=["gloo", "sockets"])
@pytest.mark.parametrize("length", [0, 1, module._FIRST - 2, module._FIRST - 1, 90000])
def test_orders_of_any_length(length: int, sockets: bool) -> None:
    def send_or_receive(group: RankGroup) -> Any:
        if group.rank == 0:
            group.send(Order.STEP, torch.arange(length))
            group.send(Order.END, torch.empty(0, dtype=torch.int64))
            return None
        order, numbers = group.receive()
        return order, numbers.tolist(), group.receive()[0]

    assert on_ranks(send_or_receive, sockets=sockets)[1:] == [(Order.STEP, list(range(length)), Order.END)] * (RANKS - 1)


def test_orders_to_who_does_not_listen_have_a_limit() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        orders = SocketOrders([ours])
        # there is room for some that are not read yet
        orders.send(Order.STEP, torch.arange(9), 5.0)
        with pytest.raises(RuntimeError, match=r"^rank 1 has not taken an order: timed out$"):
            orders.send(Order.STEP, torch.arange(1_000_000), 0.05)
        theirs.close()
        with pytest.raises(RuntimeError, match=r"^rank 1 has not taken an order: .*Broken pipe$"):
            orders.send(Order.STEP, torch.arange(9), 5.0)


def test_a_rank_is_told_that_rank_0_has_ended() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        with pytest.raises(RuntimeError, match=r"^rank 0 has ended$"):
            SocketOrders([theirs]).receive()


def test_tokens_are_compared_now_and_then() -> None:
    """The sums tell slots apart: two that have exchanged their tokens differ."""

    def compare(group: RankGroup) -> Any:
        tokens = torch.tensor([4, 9] if group.rank == 1 else [9, 4])
        found = [group.compare(tokens) for _ in range(COMPARED)]
        assert found[:-1] == [None] * (COMPARED - 1)
        return found[-1].tolist()

    assert on_ranks(compare) == [[[17, 22, 17]]] * RANKS
