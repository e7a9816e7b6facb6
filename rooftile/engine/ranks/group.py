"""`RankGroup`: what the ranks of an engine exchange.

Two groups of `torch.distributed` connect them: one of the device (NCCL on GPUs), whose collectives a CUDA graph can capture, and
one of the hosts (gloo), over which rank 0 sends its orders. They are made apart from the process's own default group.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from rooftile.engine.ranks.lines import Progress
from rooftile.engine.ranks.orders import IDLE, GlooOrders, Order, Orders
from rooftile.runtime.devices import runs_kernels

_logger = logging.getLogger(__name__)
# torch's types lack most of it
dist: Any = torch.distributed
LOOPBACK = "127.0.0.1"
# steps after which the ranks compare what they have drawn
COMPARED = 256
# seconds that a rank may take for its part of a step
LIMIT_S = 100.0
# bytes of a sentence that a rank tells the others
_SENTENCE = 1024
# seconds that NCCL gets to end what is under way
_ABORT_S = 5.0


class RankGroup:
    """The ranks of an engine, as one of them sees them.

    Args:
        store: where the ranks meet.
        rank, ranks: this process's number, from 0, and how many there are.
        device: this rank's device.
        address: the address of this machine at which gloo listens; None lets it choose. No other machine reaches LOOPBACK.
        ordered: whether sums are added in the order of the ranks, so that their bits do not depend on what is added beside them.
        limit_s: seconds that a rank may take for its part of a step; None for LIMIT_S.
        orders: what carries rank 0's orders; None for the hosts' group.
    """

    def __init__(
        self, store: Any, rank: int, ranks: int, device: torch.device, *, address: str | None, ordered: bool = False,
        limit_s: float | None = None, orders: Orders | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.ranks, self.device = rank, ranks, device
        self.ordered, self.limit_s = ordered, LIMIT_S if limit_s is None else limit_s
        self._steps = self._begun = self._collectives = 0
        self._hosts = _gloo(dist.PrefixStore("hosts", store), rank, ranks, address=address, limit=IDLE)
        self._orders: Orders = GlooOrders(self._hosts) if orders is None else orders
        limit, of_devices = timedelta(seconds=self.limit_s), dist.PrefixStore("devices", store)
        self._devices: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            # NCCL's watchdog would end the process; rank 0 waits for each step itself
            options._timeout = IDLE
            self._devices = dist.ProcessGroupNCCL(of_devices, rank, ranks, options)
        else:
            self._devices = _gloo(of_devices, rank, ranks, address=address, limit=limit)
        self._sum, self._join = dist.distributed_c10d.AllreduceOptions(), dist.distributed_c10d.AllgatherOptions()
        self._lead = dist.distributed_c10d.BroadcastOptions()
        # on the current stream, and not on one of NCCL's that the current one waits for
        self._sum.asyncOp = self._join.asyncOp = self._lead.asyncOp = False
        self._lead.rootRank = self._lead.rootTensor = 0
        self._aborting: threading.Thread | None = None
        self._lock = threading.Lock()
        self._peers: Any = None
        if device.type == "cuda":
            # NCCL connects the ranks at the first collective: here, where a rank that fails is noticed, and not in a step
            with torch.cuda.device(device):
                _wait(self._devices.allreduce([torch.zeros(1, device=device)], self._sum))
                torch.cuda.synchronize(device)
                self._peers = self._peer_sums(dist.PrefixStore("peers", store), loopback=address == LOOPBACK)

    def add(self, x: Tensor) -> Tensor:
        """Sums a tensor over all ranks, in place, and returns it."""
        self._collectives += 1
        if self._peers is not None and self._peers.takes(x):
            summed: Tensor = self._peers.add(x)
            return summed
        if self.ordered:
            # the kernel of `PeerSums` adds in the same way: sums of one answer may come from both
            total, *others = self.stack(x).float()
            for part in others:
                total = total + part
            return x.copy_(total)
        _wait(self._group().allreduce([x], self._sum))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Joins the columns (n, w) of all ranks to (n, ranks w), the columns of rank 0 first."""
        return self.stack(x).transpose(0, 1).reshape(x.shape[0], self.ranks * x.shape[1])

    def stack(self, x: Tensor) -> Tensor:
        """Returns the tensors of all ranks, (ranks, *shape)."""
        self._collectives += 1
        found = x.new_empty(self.ranks * x.shape[0], *x.shape[1:])
        _wait(self._group()._allgather_base(found, x.contiguous(), self._join))
        return found.view(self.ranks, *x.shape)

    def first(self, x: Tensor) -> Tensor:
        """Overwrites a tensor with rank 0's, and returns it."""
        self._collectives += 1
        _wait(self._group().broadcast([x], self._lead))
        return x

    def progress(self) -> Progress:
        """Returns how far this rank's host is; any thread may ask."""
        return Progress(self._begun, self._collectives)

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Returns, place by place, the least of what the ranks give."""
        found = torch.tensor(numbers)
        options = dist.distributed_c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._hosts.allreduce([found], options).wait()
        least: list[int] = found.tolist()
        return least

    def tell_all(self, words: str) -> list[str]:
        """Exchanges a sentence between the hosts: returns what each rank says, as far as there is room.

        Raises:
            RuntimeError: a rank has ended, or does not come within `limit_s` seconds.
        """
        said = words.encode()[:_SENTENCE].ljust(_SENTENCE, b"\0")
        mine = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.ranks)]
        options, limit = dist.distributed_c10d.AllgatherOptions(), timedelta(seconds=self.limit_s)
        options.timeout = limit
        self._hosts.allgather([found], [mine], options).wait(limit)
        return [bytes(each.tolist()).rstrip(b"\0").decode(errors="ignore") for each in found]

    def send(self, order: Order, numbers: Tensor, limit_s: float | None = None) -> None:
        """Sends an order with int64 numbers to all other ranks; rank 0 alone calls it.

        Args:
            limit_s: seconds until a rank must have taken it; None for the group's own limit.
        """
        self._begun += 1
        self._orders.send(order, numbers, self.limit_s if limit_s is None else limit_s)

    def receive(self) -> tuple[Order, Tensor]:
        """Waits for rank 0's next order."""
        received = self._orders.receive()
        self._begun += 1
        return received

    def compare(self, tokens: Tensor) -> Tensor | None:
        """Returns the checksums of all ranks' tokens, (1, ranks), at each COMPARED-th call, and else None.

        Args:
            tokens: the last token of each slot, (slots,), after a step.
        """
        self._steps += 1
        if self._steps % COMPARED:
            return None
        return self.gather((tokens * torch.arange(1, len(tokens) + 1, device=tokens.device)).sum().view(1, 1))

    def abort(self) -> bool:
        """Ends what is under way on the device, and lets go of the others.

        Returns whether it has ended, so that no thread looks into the ranks' store any more. CUDA graphs that hold collectives
        are gone before: NCCL waits for their end.
        """
        if self.device.type != "cuda":
            return True
        with self._lock:
            if self._aborting is None:
                # NCCL may itself wait for a rank that is no more
                self._aborting = threading.Thread(target=self._abort_device, name="rooftile abort", daemon=True)
                self._aborting.start()
        self._aborting.join(_ABORT_S)
        return not self._aborting.is_alive()

    def _abort_device(self) -> None:
        if self._peers is not None:
            self._peers.stop()
        self._devices.abort()
        # here, and not where Python collects it: its threads still look into the ranks' store
        self._devices = None

    def _peer_sums(self, store: Any, *, loopback: bool) -> Any:
        """Returns what sums small tensors faster than NCCL; None if the GPUs cannot reach each other's memory."""
        found, reason = None, "the ranks are on several machines, or Triton does not run here"
        if loopback and runs_kernels(torch.empty(0, device=self.device)):
            # here and not above: a rank on a CPU has no use for Triton
            from rooftile.engine.ranks.peers import PeerSums

            try:
                found = PeerSums(store, self.rank, self.ranks, self.device)
            except RuntimeError as error:
                reason = str(error)
        # all of them or none
        if self.least([found is not None])[0] and found is not None:
            if self.least([found.works()])[0]:
                return found
            reason = "a first sum did not end, or was wrong"
        _logger.info("the ranks leave all sums to NCCL: %s", reason)
        return None

    def _group(self) -> Any:
        """Returns the group of the device.

        Raises:
            RuntimeError: it was aborted.
        """
        devices = self._devices
        if devices is None:
            raise RuntimeError("the ranks were let go of")
        return devices


def _wait(work: Any) -> None:
    """Waits for a collective; NCCL returns nothing for one on the current stream."""
    if work is not None:
        work.wait()


def _gloo(store: Any, rank: int, ranks: int, *, address: str | None, limit: timedelta) -> Any:
    if address is None:
        return dist.ProcessGroupGloo(store, rank, ranks, limit)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = limit
    return dist.ProcessGroupGloo(store, rank, ranks, options)
