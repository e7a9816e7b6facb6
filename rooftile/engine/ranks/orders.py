"""How rank 0's orders reach the other ranks: over a socket to each on one machine, and over gloo elsewhere."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

# a rank may wait for an order as long as nobody asks anything
IDLE = timedelta(days=365)
# int64 numbers of an order that gloo sends at once; a longer one is sent in two parts
_FIRST = 2048
# an order and how many numbers follow
_HEAD = struct.Struct("qq")


class Order(IntEnum):
    """Rank 0's orders to the others."""

    END = 0
    CAPTURE = 1
    STEP = 2
    ADAPTER = 3


class Orders(Protocol):
    """Carries orders, with int64 numbers, from rank 0 to the others."""

    def send(self, order: Order, numbers: Tensor, limit_s: float) -> None:
        """Sends an order; rank 0 alone calls it.

        Raises:
            RuntimeError: a rank has ended, or has not taken it within `limit_s` seconds.
        """
        ...

    def receive(self) -> tuple[Order, Tensor]:
        """Waits for the next order; all ranks but 0 call it."""
        ...


class SocketOrders:
    """Orders over sockets: rank 0 has one for each other rank, and the others have one.

    A socket takes orders that are not read yet, as far as there is room: who is told something need not listen.
    """

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = sockets

    def send(self, order: Order, numbers: Tensor, limit_s: float) -> None:
        """Sends an order, as `Orders` says."""
        words = _HEAD.pack(order, len(numbers)) + numbers.numpy().tobytes()
        for rank, each in enumerate(self._sockets, 1):
            try:
                each.settimeout(limit_s)
                each.sendall(words)
            except OSError as error:
                raise RuntimeError(f"rank {rank} has not taken an order: {error}") from error

    def receive(self) -> tuple[Order, Tensor]:
        """Waits for the next order."""
        order, count = _HEAD.unpack(self._read(bytearray(_HEAD.size)))
        numbers = torch.empty(count, dtype=torch.int64)
        if count:
            bytes_of: Any = numbers.numpy()
            self._read(memoryview(bytes_of).cast("B"))
        return Order(order), numbers

    def _read(self, into: bytearray | memoryview) -> bytearray | memoryview:
        read = self._sockets[0].recv_into(into, len(into), socket.MSG_WAITALL)
        if read < len(into):
            raise RuntimeError("rank 0 has ended")
        return into


class GlooOrders:
    """Orders over a gloo group of all ranks, which sends nothing before a rank listens."""

    def __init__(self, hosts: Any) -> None:
        self._hosts = hosts

    def send(self, order: Order, numbers: Tensor, limit_s: float) -> None:
        """Sends an order, as `Orders` says."""
        limit = timedelta(seconds=limit_s)
        first = torch.empty(_FIRST, dtype=torch.int64)
        first[0], first[1] = int(order), len(numbers)
        now, later = numbers[: _FIRST - 2], numbers[_FIRST - 2 :]
        first[2 : 2 + len(now)] = now
        self._broadcast(first, limit)
        if len(later):
            self._broadcast(later, limit)

    def receive(self) -> tuple[Order, Tensor]:
        """Waits for the next order."""
        first = torch.empty(_FIRST, dtype=torch.int64)
        self._broadcast(first, IDLE)
        order, length = Order(int(first[0])), int(first[1])
        numbers = first[2 : 2 + length]
        if length > len(numbers):
            later = torch.empty(length - len(numbers), dtype=torch.int64)
            self._broadcast(later, IDLE)
            numbers = torch.cat((numbers, later))
        return order, numbers

    def _broadcast(self, x: Tensor, limit: timedelta) -> None:
        options: Any = torch.distributed.distributed_c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, limit
        self._hosts.broadcast([x], options).wait()
