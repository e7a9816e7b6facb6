"""Two streams of a GPU on which a rank's calls of attention alternate.

A call's last tiles leave processors idle: 3 % of a call whose tiles go round 16 times. The next call's first tiles fill them,
if it waits in another stream. On a CPU calls follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# by device and by the stream that calls are made on
_SIDES: dict[tuple[int, int], torch.cuda.Stream] = {}


class Lanes:
    """The current stream and one beside it, between `fork` and `join`."""

    def __init__(self, device: torch.device) -> None:
        self._side: torch.cuda.Stream | None = None
        self._ready: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            key = self._main.device_index, self._main.cuda_stream
            if key not in _SIDES:
                _SIDES[key] = torch.cuda.Stream(device)
            self._side = _SIDES[key]

    def fork(self) -> None:
        """Lets the lanes begin after all that the current stream was given so far. What they read is kept until `join`."""
        if self._side is not None:
            self._ready = self._main.record_event()

    @contextmanager
    def lane(self, n: int) -> Iterator[None]:
        """Runs what is inside on lane n, of which every other one is the current stream."""
        if self._side is None or n % 2 == 0:
            yield
            return
        assert self._ready is not None
        self._side.wait_event(self._ready)
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """Lets the current stream wait for the other lane."""
        if self._side is not None:
            self._main.wait_stream(self._side)
