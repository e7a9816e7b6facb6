"""Progress on stderr: a bar with the time left on a terminal, a line per experiment elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Shows how far the experiments are, by the seconds that the plan expects of each.

    >>> progress = Progress({"machine": 5.0, "model": 60.0})
    >>> progress.show("machine", 0.5, "measuring the copy rate")
    """

    def __init__(self, seconds: dict[str, float], stream: TextIO | None = None) -> None:
        self.seconds = seconds
        self.stream = stream if stream is not None else sys.stderr
        self._last = ""
        console = Console(file=self.stream)
        # a thread that draws would disturb what is timed, so the bar is drawn only at each step
        self._bar = Bar(
            BarColumn(20), TimeRemainingColumn(), TextColumn("{task.description}"), console=console, transient=True, auto_refresh=False
        )  # fmt: skip
        self._task = self._bar.add_task("", total=sum(seconds.values()))

    def share(self, experiment: str, done: float) -> float:
        """Returns the fraction of all experiments that is done, if `done` of one is."""
        names = list(self.seconds)
        before = sum(self.seconds[name] for name in names[: names.index(experiment)])
        return (before + done * self.seconds[experiment]) / sum(self.seconds.values())

    def show(self, experiment: str, done: float, doing: str) -> None:
        if not self.stream.isatty():
            if experiment != self._last:
                print(f"{experiment}: {doing}", file=self.stream, flush=True)
            self._last = experiment
            return
        self._bar.start()
        self._bar.update(self._task, completed=self.share(experiment, done) * sum(self.seconds.values()), description=doing)
        self._bar.refresh()

    def clear(self) -> None:
        # elsewhere than on a terminal, stopping a bar prints an empty line
        if self.stream.isatty():
            self._bar.stop()
