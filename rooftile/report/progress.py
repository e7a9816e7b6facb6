"""A progress line on a terminal: the current step, the fraction done, and the estimated time left."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 20


class Progress:
    """Experiments with expected seconds. Prints nothing if the stream is not a terminal.

    >>> progress = Progress({"machine": 5.0, "model": 60.0})
    >>> progress.show("machine", 0.5, "measuring the copy rate")
    """

    def __init__(self, seconds: dict[str, float], stream: TextIO | None = None) -> None:
        self.seconds = seconds
        self.stream = stream if stream is not None else sys.stderr
        self.began = time.monotonic()

    def share(self, experiment: str, done: float) -> float:
        """Returns the fraction of all experiments that is done, if `done` of one is."""
        names = list(self.seconds)
        before = sum(self.seconds[name] for name in names[: names.index(experiment)])
        return (before + done * self.seconds[experiment]) / sum(self.seconds.values())

    def show(self, experiment: str, done: float, doing: str) -> None:
        if not self.stream.isatty():
            return
        share = self.share(experiment, done)
        elapsed = time.monotonic() - self.began
        expected = sum(self.seconds.values())
        # the plan's estimate at first, then this machine's pace
        left = (1 - share) * ((1 - share) * expected + share * elapsed / max(share, 1e-3))
        bar = "━" * round(share * WIDTH) + "─" * (WIDTH - round(share * WIDTH))
        self.stream.write(f"\r\x1b[K{bar} {doing}, about {max(round(left), 1)} s left")
        self.stream.flush()

    def clear(self) -> None:
        if self.stream.isatty():
            self.stream.write("\r\x1b[K")
            self.stream.flush()
