"""Finds the steps of a script that no optimiser ends: the turns of a loop in its own code.

A place is the chain of lines of the script's own code that leads to a call. A place that is reached again is in a loop, and each
time a turn has ended. A turn ends after a backward where the script has one: it then holds a forward, the backward, and the
update that the script makes by itself. Without a backward it ends before the first of several calls of modules. A library that
calls modules many times for one call of the script, such as `model.generate`, is at one place all the while.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch

from rooftile.diagnosis.watching.steps import Source, Steps
from rooftile.diagnosis.watching.where import is_own
from rooftile.runtime.operators import in_backward

Place = tuple[tuple[CodeType, int], ...]
# flags of code whose frame may wait in the middle of its work
SUSPENDS = 0x20 | 0x80 | 0x200


class Turns:
    """Ends steps where a loop of the script's own code turns.

    Args:
        steps: the steps of the script. They follow an optimiser, or the script's own marks, where there are any.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.will_train = False
        """Whether the script has made an optimiser: turns without a backward are no steps then."""
        self._backwards: Counter[Place] = Counter()
        self._calls: dict[Place, int] = {}  # the number of calls before the last visit of a place
        self._inside: dict[Place, FrameType] = {}  # the library's function that the script has called at a place
        self._count = 0
        self._leader: dict[Source, Place] = {}

    def note_backward(self, frame: FrameType) -> None:
        """Notes a backward that has ended; `frame` is its caller's."""
        place, _ = place_of(frame)
        self._backwards[place] += 1
        if self._backwards[place] > 1:
            self._turn(Source.BACKWARD, place)

    def note_call(self, frame: FrameType) -> None:
        """Notes a call of a module, from outside of all modules, before it runs; `frame` is its caller's."""
        place, inside = place_of(frame)
        if place in self._inside and self._inside[place] is inside and not _clear(inside):
            # the library's function still runs
            self._count += 1
            return
        before = self._calls.get(place)
        self._calls[place] = self._count
        if inside is not None:
            self._inside[place] = inside
        # a turn with one call needs no steps: the call can be made again, and with other batches
        if before is not None and not self.will_train and (self._count - before > 1 or self._leader.get(Source.MODULES) == place):
            self._turn(Source.MODULES, place)
        self._count += 1

    def _turn(self, source: Source, place: Place) -> None:
        if self._leader.setdefault(source, place) == place and self._steps.follows(source):
            self._steps.boundary()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes every backward in the block."""
        originals = torch.autograd.backward, torch.autograd.grad

        def noting(original: Any) -> Any:
            def noted(*args: Any, **kwargs: Any) -> Any:
                outermost = not in_backward()
                result = original(*args, **kwargs)
                if outermost:
                    self.note_backward(sys._getframe(1))
                return result

            return noted

        torch.autograd.backward, torch.autograd.grad = map(noting, originals)
        try:
            yield
        finally:
            torch.autograd.backward, torch.autograd.grad = originals


def place_of(frame: FrameType | None) -> tuple[Place, FrameType | None]:
    """Returns the place that a call is made from, and the function of a library that the script has called there, if any."""
    chain: list[tuple[CodeType, int]] = []
    inside, callee = None, None
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            if not chain and callee is not None and not callee.f_code.co_flags & SUSPENDS:
                inside = callee
            chain.append((frame.f_code, frame.f_lasti))
        callee, frame = frame, frame.f_back
    return tuple(chain), inside


def _clear(frame: FrameType | None) -> bool:
    """Lets go of what a function that has returned held; returns False if it still runs."""
    try:
        if frame is not None:
            frame.clear()
    except RuntimeError:
        return False
    return True
