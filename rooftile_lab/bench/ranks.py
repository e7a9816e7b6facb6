"""The ranks of a benchmark that torchrun has started, one per GPU, and their common clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rooftile.errors import InvalidInput
from rooftile.hardware.clock import Work

# a contestant that hangs on one rank ends the run
PATIENCE = timedelta(seconds=120)


@contextmanager
def joined(kind: str) -> Iterator[tuple[torch.device, int]]:
    """Joins the group of torchrun's processes, and leaves it at the end.

    Gives this rank's device of a kind, "cuda" or "cpu", and the rank.
    """
    if not dist.is_torchelastic_launched():
        raise InvalidInput(
            "this benchmark runs on several ranks; "
            "start it as torchrun --nproc-per-node GPUS -m rooftile_lab bench context-parallel"
        )
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        if local >= torch.cuda.device_count():
            raise InvalidInput(f"rank {local} of this machine has no GPU: it has {torch.cuda.device_count()}; start fewer ranks")
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=PATIENCE, device_id=device if kind == "cuda" else None)
    try:
        yield device, dist.get_rank()
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class RanksClock:
    """Times calls that all ranks make together: each sample is the mean of calls that follow one another, on the slowest rank.

    Calls in a row leave the host ahead of the GPU, as in training; where it is not, its time counts.
    """

    device: torch.device
    budget_us: float = 150e3  # the time of one sample
    patience_us: float = 1.2e6  # a work that has taken so long in all takes no further turns
    most_calls: int = 20

    def most(self, value: float) -> float:
        """Returns the greatest value of all ranks."""
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def take_turns(self, works: Mapping[str, Work], rounds: int = 3) -> dict[str, list[float]]:
        """Returns all samples of each work in µs; the works take turns, back and forth. Each has run before."""
        calls = {name: self._calls(work) for name, work in works.items()}
        taken: dict[str, list[float]] = {name: [] for name in works}
        for turn in range(rounds):
            for name in list(works)[:: -1 if turn % 2 else 1]:
                # every rank has the same samples, and so the same patience
                if sum(taken[name]) * calls[name] < self.patience_us:
                    taken[name].append(self._sample(works[name], calls[name]))
        return taken

    def agree(self, work: Callable[[], Any]) -> tuple[Any, str]:
        """Returns what work gave, and the reason why it failed on this rank or another, or ""."""
        found, reason = None, ""
        try:
            found = work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        reasons: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        return found, next((each for each in reasons if each), "")

    def _calls(self, work: Work) -> int:
        # every rank makes as many calls, or the others would wait for ever
        return max(1, min(self.most_calls, int(self.budget_us / self.most(self._sample(work, 1)))))

    def _sample(self, work: Work, calls: int) -> float:
        dist.barrier()
        if self.device.type != "cuda":
            began = time.perf_counter()
            for _ in range(calls):
                work()
            return self.most((time.perf_counter() - began) / calls * 1e6)
        torch.cuda.synchronize(self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            work()
        end.record()
        torch.cuda.synchronize(self.device)
        return self.most(start.elapsed_time(end) / calls * 1e3)
