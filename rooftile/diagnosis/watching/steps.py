"""Begins and ends the steps of a program, and does something at each of them.

A program is watched while it runs: its first steps warm it up, the next ones are timed, one is watched by a dispatch mode, one
recorded, one profiled. Each of these is a context manager in which one step runs; `Steps` enters and leaves them in turn, as the
program goes from step to step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import Any

import torch

from rooftile.diagnosis.watching.preempted import preempted_us
from rooftile.runtime.words import answers_foreign_words


class Source(IntEnum):
    """Tells who says where a step ends; each member knows better than the members before it."""

    NONE, MODULES, BACKWARD, OPTIMISER, MARKS = range(5)


# a role makes the block that one step runs in; None if no step is needed for it any more
Role = Callable[[], AbstractContextManager[Any] | None]


class Finished(BaseException):
    """Ends a program whose steps have all been seen: no `except Exception` of the program stops it."""


class Steps:
    """Runs each step of a program in the next of `roles`; `done` is called after the last one, within the program."""

    def __init__(self, roles: Sequence[Role], done: Callable[[], None]) -> None:
        self._roles = list(roles)
        self._done = done
        self._open: AbstractContextManager[Any] | None = None
        self.seen = 0
        self.runs = 1  # how often the program was run
        self._is_first = False
        self._process = os.getpid()
        self.source = Source.NONE
        self.is_finished = False  # no more steps are asked for, with all seen or not
        self.is_own_work = False  # what runs, or has failed, is the diagnosis and not the program

    @property
    def needed(self) -> int:
        """How many steps there must be."""
        return len(self._roles)

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a process that the program has forked: its steps were not asked about."""
        return os.getpid() != self._process

    @property
    def is_stepping(self) -> bool:
        """Whether the program has steps."""
        return self.source != Source.NONE

    def follows(self, source: Source) -> bool:
        """Whether steps end where a source says so. A better source begins anew."""
        if source > self.source:
            self.abandon(Finished())
            self.source, self.seen = source, 0
        return source == self.source

    def run_again(self) -> None:
        """The program has ended and is run again: its next step warms it up, and does not count."""
        self._is_first = True
        self.runs += 1

    def begin(self) -> None:
        if not self.is_elsewhere and self.seen < len(self._roles):
            role = nullcontext() if self._is_first else self._next_role()
            with self._own_work():
                role.__enter__()
            self._open = role

    def _next_role(self) -> AbstractContextManager[Any]:
        while (role := self._roles[self.seen]()) is None:
            self.seen += 1
        return role

    def end(self) -> None:
        role, self._open = self._open, None
        if role is None or self.is_elsewhere:
            return
        with self._own_work():
            role.__exit__(None, None, None)
        if self._is_first:
            self._is_first = False
            return
        self.seen += 1
        if self.seen == len(self._roles):
            with self._own_work():
                self._done()

    @contextmanager
    def _own_work(self) -> Iterator[None]:
        self.is_own_work = True
        yield
        # an error leaves it set: the program is not to blame
        self.is_own_work = False

    def boundary(self) -> None:
        """One step ends here, and the next begins."""
        self.end()
        self.begin()

    def abandon(self, error: BaseException) -> None:
        """Leaves the open step, if there is one, because the program ended or failed in it."""
        role, self._open = self._open, None
        if role is not None and not self.is_elsewhere:
            role.__exit__(type(error), error, error.__traceback__)


# the steps of the program that is being watched, if there is one
_watched: list[Steps] = []


@contextmanager
def watching(steps: Steps) -> Iterator[None]:
    """`step()` reports to `steps` inside the block. At its end the step that the program has begun is left."""
    _watched.append(steps)
    try:
        yield
    finally:
        _watched.remove(steps)
        steps.abandon(Finished())


@contextmanager
@answers_foreign_words
def step() -> Iterator[None]:
    """Marks a step of a program for `rooftile diagnose`; does nothing otherwise.

    Example:
        >>> for batch in batches:
        ...     with rooftile.diagnosis.step():
        ...         train(batch)
    """
    if not _watched:
        yield
        return
    steps = _watched[-1]
    steps.follows(Source.MARKS)
    steps.begin()
    try:
        yield
    except BaseException as error:
        steps.abandon(error)
        raise
    steps.end()


class StepTimer:
    """Times the step that runs in its block, device and host together; the time in µs is added to `taken`.

    Time in which other programs kept a CPU's thread from running is left out.

    led: a `Lead` on this GPU came right before; the time begins where the device has ended its step.
    """

    def __init__(self, device: torch.device, taken: list[float], *, led: bool = False) -> None:
        self._device, self._taken, self._led = device, taken, led

    def __enter__(self) -> StepTimer:
        if self._led:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._begin.record()
        else:
            wait_for(self._device)
        self._preempted_us = preempted_us()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._led:
            self._end.record()
        wait_for(self._device)
        if error[0] is not None:
            return
        us = (time.perf_counter() - self._start) * 1e6
        if self._led:
            us = self._begin.elapsed_time(self._end) * 1e3
        # a GPU goes on meanwhile
        lost_us = preempted_us() - self._preempted_us if self._device.type == "cpu" else 0.0
        self._taken.append(max(us - lost_us, us / 100))


class Lead:
    """Runs a step right before a timed one on a GPU, and does not wait for its end.

    A program asks a GPU for its next step while the device is at the last one. A step that begins with nothing to do would take
    longer than the program's own, by the host's time before its first kernels. The time until the host has asked for all of it
    is added to `launched`.
    """

    def __init__(self, device: torch.device, launched: list[float] | None = None) -> None:
        self._device, self._launched = device, launched

    def __enter__(self) -> Lead:
        wait_for(self._device)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None and self._launched is not None:
            self._launched.append((time.perf_counter() - self._start) * 1e6)


def wait_for(device: torch.device) -> None:
    """Waits until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
