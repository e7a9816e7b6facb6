"""The measured rate of the link between the ranks of a `torch.distributed` group."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from rooftile.runtime.devices import arch

# bytes that a rank sends in the collective that measures the rate, and calls of which the median counts
BYTES, CALLS, IN_A_ROW = 1 << 28, 5, 4
# fewer over gloo, which moves them through the host
BYTES_OF_HOST = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The rate at which a rank sends while all ranks send, and the time of a collective that moves next to nothing."""

    ranks: int
    gbs: float  # in an all-to-all, 1e9 bytes per second
    latency_us: float

    def time_us(self, sent: float, collectives: int = 1) -> float:
        """Returns the time of collectives in which a rank sends a number of bytes in all."""
        return collectives * self.latency_us + sent / self.gbs / 1e3


# NVLink of one host, for who has not measured: 78 % of the datasheet's rate in one direction
ASSUMED_GBS = {"sm80": 234.0, "sm90": 351.0, "sm100": 702.0}
ASSUMED_LATENCY_US = 20.0
# by the ranks of the group and the device
_MEASURED: dict[tuple[tuple[int, ...], str], Link] = {}


def measure(group: Any, device: torch.device, *, refresh: bool = False) -> Link:
    """Returns the link of a group, measured once per process; every rank of the group calls this.

    Args:
        group: a process group.
        device: the device whose tensors it moves.
        refresh: measure again.
    """
    key = tuple(dist.get_process_group_ranks(group)), device.type
    if refresh or key not in _MEASURED:
        _MEASURED[key] = _measure(group, device)
    return _MEASURED[key]


def known(group: Any, device: torch.device) -> Link | None:
    """Returns the link of a group that was measured, else what the architecture's NVLink gives; None where there is none.

    Nothing is measured, and no rank waits.
    """
    key = tuple(dist.get_process_group_ranks(group)), device.type
    gbs = ASSUMED_GBS.get(arch(device))
    if key in _MEASURED or gbs is None:
        return _MEASURED.get(key)
    return Link(ranks=len(key[0]), gbs=gbs, latency_us=ASSUMED_LATENCY_US)


def _measure(group: Any, device: torch.device) -> Link:
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return Link(ranks=1, gbs=float("inf"), latency_us=0.0)
    nbytes = BYTES if device.type == "cuda" else BYTES_OF_HOST
    few, many = (_all_to_all_us(group, device, size) for size in (16 * ranks, nbytes * ranks // (ranks - 1)))
    # rounded: every rank has the same numbers, of the slowest
    found = torch.tensor([few, max(many - few, 1e-3)], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    latency, moving = found.tolist()
    return Link(ranks=ranks, gbs=float(f"{nbytes / moving / 1e3:.4g}"), latency_us=float(f"{latency:.4g}"))


def _all_to_all_us(group: Any, device: torch.device, nbytes: int) -> float:
    """The median time of an all-to-all of a buffer, of which the rank keeps its own part."""
    ranks = dist.get_world_size(group)
    sent = torch.zeros(nbytes // ranks // 16 * 16 * ranks, dtype=torch.uint8, device=device)
    got = torch.empty_like(sent)
    return median(timed_us(lambda: dist.all_to_all_single(got, sent, group=group), group, device) for _ in range(CALLS + 1))


def timed_us(collective: Callable[[], Any], group: Any, device: torch.device) -> float:
    """Returns the mean time of calls of a collective that follow one another, from when all ranks are there."""
    dist.barrier(group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(IN_A_ROW):
        collective()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / IN_A_ROW * 1e6
