"""`Leader`: what rank 0 does for the others: it sends orders, notices failures, and ends them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rooftile.engine.ranks.failures import RankEnded, timed_out
from rooftile.engine.ranks.group import RankGroup
from rooftile.engine.ranks.lines import Lines, Told
from rooftile.engine.ranks.orders import Order
from rooftile.engine.ranks.processes import WorkerProcesses
from rooftile.errors import InvalidInput, Unsupported

# seconds in which the end of a rank is noticed after it has broken a collective
_NOTICED_S = 2.0
# seconds in which a rank that is told to end must listen
_HEARD_S = 3.0
# seconds in which a rank that is asked how far it is must answer
_ANSWER_S = 1.0
# how often it is asked whether a step has ended on the device
_PAUSE_S = 2e-5
_NO_NUMBERS = torch.empty(0, dtype=torch.int64)


class Leader:
    """Rank 0 of an engine's ranks. A rank that fails ends the engine: the others no longer know what was computed.

    Args:
        ranks: how many ranks there are.
        told: whether the end of a rank is noticed by somebody, who then ends them all and says which.
    """

    def __init__(self, ranks: int, *, told: bool = True) -> None:
        self.ranks, self._told = ranks, told
        self.group: RankGroup | None = None
        self.processes: WorkerProcesses | None = None
        self.forget_graphs: Callable[[], None] | None = None
        """Lets go of the CUDA graphs of this rank."""
        self.lines: Lines | None = None
        self._failure: Exception | None = None
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()

    def check(self) -> None:
        """Raises the reason why the engine computes no more; returns if it does."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        if self._closed:
            raise InvalidInput("the LLM was closed; make another")

    def fail(self, reason: Exception) -> None:
        """Ends all ranks but this one, for a reason that every later call gets; any thread may call it."""
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = reason
        self._failed.set()
        self._end(patient=False)

    def note_end(self, rank: int, told: Told | None) -> None:
        """Notes the end of a rank that torchrun has started."""
        self.fail(RankEnded(f"rank {rank} of {self.ranks} has ended") if told is None else told.error(rank, self.ranks))

    def close(self) -> None:
        """Ends the other ranks, after the step in flight."""
        # a forked process has a copy of this object, and must not end what is its parent's
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        told = False
        if self._failure is None and self.group is not None:
            try:
                self.group.send(Order.END, _NO_NUMBERS, _HEARD_S)
                told = True
            except RuntimeError:
                pass  # the rank that does not hear it has ended, or is ended now
        self._end(patient=told)

    def _end(self, *, patient: bool) -> None:
        """Ends the other processes, what is under way on the device, and then the file at which the ranks have met."""
        if self.processes is not None:
            self.processes.close(patient=patient)
        elif self.lines is not None:
            if self._failure is None:
                self.lines.say_goodbye()
            self.lines.close()
        if self.forget_graphs is not None:
            self.forget_graphs()
        left = self.group is None or self.group.abort()
        if self.processes is not None and left:
            self.processes.remove_meeting()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Ends the ranks if the block fails: they may have run another part of it.

        Raises:
            RankEnded: a rank has ended.
        """
        self.check()
        try:
            yield
        except (InvalidInput, Unsupported, RankEnded) as error:
            self.fail(error)
            raise
        except RuntimeError as error:
            # a rank that ends breaks the collectives of the others; one that hangs is asked while the others wait for it
            if timed_out(error) or not self._failed.wait(_NOTICED_S if self._told else 0.0):
                self.fail(self._named(error))
            self.check()
            raise
        except BaseException as error:
            self.fail(RankEnded(f"{type(error).__name__} has interrupted the ranks in a step: make another LLM"))
            raise

    def wait_for(self, event: torch.cuda.Event | None, sums: Tensor | None) -> None:
        """Waits for a step on the device.

        Args:
            event: what the device reaches after the step; None on a CPU.
            sums: the ranks' checksums of tokens, if they were compared.

        Raises:
            RankEnded: a rank has ended, does not answer, or has drawn other tokens.
        """
        assert self.group is not None
        with self.guarded():
            until = time.monotonic() + self.group.limit_s
            while event is not None and not event.query():
                self.check()
                if time.monotonic() > until:
                    raise self._late()
                time.sleep(_PAUSE_S)
            found = [] if sums is None else sums.flatten().tolist()
            if len(set(found)) > 1:
                raise RankEnded(f"the {self.ranks} ranks have drawn different tokens; their checksums are {found}")

    def fail_late(self) -> None:
        """Ends all ranks but this one, since one of them has not ended its part in time."""
        self.fail(self._late())

    def _late(self) -> RankEnded:
        """Returns which rank has not ended its part of a step: whose host is behind the others, or does not answer."""
        assert self.group is not None
        late = f"has not ended its part of a step within {self.group.limit_s:.0f} s"
        found = {} if self.lines is None else self.lines.progress(_ANSWER_S)
        silent = [rank for rank in range(1, self.ranks) if rank not in found]
        if silent:
            return RankEnded(f"rank {silent[0]} of {self.ranks} {late}: its process does not answer")
        found[0] = self.group.progress()
        last, first = min(found, key=lambda rank: found[rank]), max(found.values())
        if found[last] == first:
            return RankEnded(f"a rank of {self.ranks} {late}; all have begun the same sum, so a device or the link hangs")
        pairs = zip(("orders", "sums"), found[last], first, strict=True)
        word, here, there = next(pair for pair in pairs if pair[1] < pair[2])
        return RankEnded(f"rank {last} of {self.ranks} {late}: it has begun {here:,} {word}, another rank {there:,}")

    def _named(self, error: RuntimeError) -> Exception:
        """Returns why the ranks are lost, if no process of theirs has ended."""
        if timed_out(error):
            return self._late()
        return RankEnded(f"a step has failed on rank 0 of {self.ranks}: {error}")
