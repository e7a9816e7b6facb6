"""One line on a terminal: what is being measured, how far it is, and how long the rest may take."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 20


class Progress:
    """Experiments with expected seconds. Prints nothing where the stream is no terminal.

    >>> progress = Progress({"machine": 5.0, "model": 60.0})
    >>> progress.show("machine", 0.5, "measuring the copy rate")
    """

    def __init__(self, seconds: dict[str, float], stream: TextIO | None = None) -> None:
        self.seconds = seconds
        self.stream = stream if stream is not None else sys.stderr
        self.began = time.monotonic()

    def share(self, experiment: str, done: float) -> float:
        """How much of the whole is done, when `done` of an experiment is."""
        names = list(self.seconds)
        before = sum(self.seconds[name] for name in names[: names.index(experiment)])
        return (before + done * self.seconds[experiment]) / sum(self.seconds.values())

    def show(self, experiment: str, done: float, doing: str) -> None:
        if not self.stream.isatty():
            return
        share = self.share(experiment, done)
        elapsed = time.monotonic() - self.began
        expected = sum(self.seconds.values())
        # the plan's guess at first, then what this machine shows
        left = (1 - share) * ((1 - share) * expected + share * elapsed / max(share, 1e-3))
        bar = "━" * round(share * WIDTH) + "─" * (WIDTH - round(share * WIDTH))
        self.stream.write(f"\r\x1b[K{bar} {doing}, about {max(round(left), 1)} s left")
        self.stream.flush()

    def clear(self) -> None:
        if self.stream.isatty():
            self.stream.write("\r\x1b[K")
            self.stream.flush()
