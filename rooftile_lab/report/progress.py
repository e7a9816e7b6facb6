"""Progress on stderr: the expected time from a probe, then a bar on a terminal, and elsewhere a line for each experiment."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from rooftile_lab.report.probe import Probe, minutes

# seconds between the lines in which a long experiment says how far it is, where the terminal cannot draw a bar
EVERY_S = 30.0
# the share of the plan's time that the probe counts as
TRUST = 0.2


class Progress:
    """Shows how far the experiments are, by the seconds that the plan expects of each.

    >>> progress = Progress({"machine": 5.0, "model": 60.0})
    >>> progress.show("machine", 0.5, "measuring the copy rate")
    """

    def __init__(self, seconds: dict[str, float], stream: TextIO | None = None) -> None:
        self.seconds = seconds
        self.stream = stream if stream is not None else sys.stderr
        self.slower = self._probed = 1.0
        self._taken: dict[str, float] = {}
        self._last, self._told = "", 0.0
        console = Console(file=self.stream)
        # a thread that draws would disturb what is timed, so the bar is drawn only at each step
        self._bar = Bar(
            BarColumn(20), TimeRemainingColumn(), TextColumn("{task.description}"), console=console, transient=True, auto_refresh=False
        )  # fmt: skip
        self._task = self._bar.add_task("", total=sum(seconds.values()))

    def expect(self, found: Probe) -> None:
        """Says how long all experiments will take."""
        self.slower = self._probed = found.slower
        print(f"report: {found.words(self.seconds)}", file=self.stream, flush=True)

    def done(self, experiment: str, seconds: float) -> None:
        """Learns from an experiment's time how long the others will take."""
        self._taken[experiment] = seconds
        # the probe counts as a fifth of the work: short experiments say little
        weight = TRUST * sum(self.seconds.values())
        expected = sum(self.seconds[name] for name in self._taken)
        self.slower = (self._probed * weight + sum(self._taken.values())) / (weight + expected)

    def left_s(self, share: float) -> float:
        """Returns the time that is left, if a share of the work is done."""
        return (1 - share) * self.slower * sum(self.seconds.values())

    def share(self, experiment: str, done: float) -> float:
        """Returns the fraction of all experiments that is done, if `done` of one is."""
        names = list(self.seconds)
        before = sum(self.seconds[name] for name in names[: names.index(experiment)])
        return (before + done * self.seconds[experiment]) / sum(self.seconds.values())

    def show(self, experiment: str, done: float, doing: str) -> None:
        """Says what an experiment does; done: the fraction of it that is."""
        share = self.share(experiment, done)
        if not self.stream.isatty():
            now = time.monotonic()
            if experiment != self._last or now - self._told > EVERY_S:
                left = f"{100 * share:.0f} % done, about {minutes(self.left_s(share))} left"
                print(f"{experiment}: {doing} ({left})", file=self.stream, flush=True)
                self._told = now
            self._last = experiment
            return
        self._bar.start()
        self._bar.update(self._task, completed=share * sum(self.seconds.values()), description=doing)
        self._bar.refresh()

    def clear(self) -> None:
        """Takes the bar away."""
        # elsewhere than on a terminal, stopping a bar prints an empty line
        if self.stream.isatty():
            self._bar.stop()
